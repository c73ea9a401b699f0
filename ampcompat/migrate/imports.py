"""``--to ampcompat``: ``apex`` becomes ``ampcompat`` in import statements and in probes by name.

Nothing else changes; what is used and not provided is marked, at the import and at each use.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampcompat._extensions import EXTENSIONS
from ampcompat.check.findings import UNSUPPORTED
from ampcompat.check.scan import used
from ampcompat.check.source import Source
from ampcompat.check.symbols import canonical, verdict
from ampcompat.migrate.marks import code_of, marked
from ampcompat.migrate.proof.mark import insert

PROBES = ("find_spec", "import_module", "__import__")
Line = cst.SimpleStatementLine


def rewrite_imports(module: cst.Module) -> cst.Module:
    """The module with its apex imports renamed."""
    return module.visit(_Imports())


def mark_uses(source: Source, code: str) -> str:
    """``code`` with a mark above each use of a name that is not provided; imports are marked where they are renamed."""
    marks = [
        (getattr(node, "lineno", 1), f"{canonical(name)} is not provided: {verdict(name).note}")
        for node in source.nodes
        if (name := used(source, node)) is not None and verdict(name).verdict == UNSUPPORTED
    ]
    return insert(code, marks) if marks else code


def _renamed(name: str) -> str | None:
    """``apex.amp`` as ``ampcompat.amp``; None for other packages and for what has no counterpart."""
    root, _, rest = name.partition(".")
    if root not in ("apex", *EXTENSIONS) or verdict(name).verdict == UNSUPPORTED:
        return None
    return f"ampcompat.{name}" if root in EXTENSIONS else f"ampcompat{'.' + rest if rest else ''}"


def _ours(name: str) -> bool:
    return name.partition(".")[0] in ("apex", *EXTENSIONS)


class _Imports(cst.CSTTransformer):
    def leave_SimpleStatementLine(self, original_node: Line, updated_node: Line) -> Line | cst.FlattenSentinel[Line]:
        if len(updated_node.body) != 1:
            names = [n for part in updated_node.body for n in _imported(part)]
            if any(map(_ours, names)):
                return marked(updated_node, "put this import on a line of its own and migrate again")
            return updated_node
        (statement,) = updated_node.body
        if isinstance(statement, cst.Import):
            return _import(updated_node, statement)
        if isinstance(statement, cst.ImportFrom):
            return _import_from(updated_node, statement)
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        function = code_of(updated_node.func).rpartition(".")[2]
        if function not in PROBES or not updated_node.args:
            return updated_node
        value = updated_node.args[0].value
        name = value.raw_value if isinstance(value, cst.SimpleString) else ""
        new = _renamed(name) if name.partition(".")[0] == "apex" else None
        if new is None or not isinstance(value, cst.SimpleString):
            return updated_node
        given = value.with_changes(value=value.value.replace(name, new))
        return updated_node.with_changes(args=[updated_node.args[0].with_changes(value=given), *updated_node.args[1:]])


def _imported(part: cst.BaseSmallStatement) -> list[str]:
    if isinstance(part, cst.Import):
        return [code_of(alias.name) for alias in part.names]
    if isinstance(part, cst.ImportFrom) and part.module is not None and not part.relative:
        return [code_of(part.module)]
    return []


def _unsupported(line: Line, names: Sequence[str]) -> Line:
    notes = [f"{name} is not provided: {verdict(name).note}" for name in names]
    return marked(line, "; ".join(notes))


def _import(line: Line, statement: cst.Import) -> Line | cst.FlattenSentinel[Line]:
    """Each alias on its own: a plain ``import apex.amp`` binds ``apex``, which the uses below go on calling."""
    names = _imported(statement)
    if not any(map(_ours, names)):
        return line
    aliases: list[str] = []
    left: list[str] = []
    binds_apex = False
    for alias, name in zip(statement.names, names, strict=True):
        asname = f" as {code_of(alias.asname.name)}" if alias.asname else ""
        new = _renamed(name) if _ours(name) else name
        if new is None:
            left.append(name + asname)
        elif asname or not _ours(name):
            aliases.append(new + asname)
        elif name in EXTENSIONS:
            aliases.append(f"{new} as {name}")
        else:
            aliases += [new] if "." in new else []
            binds_apex = True
    aliases += ["ampcompat as apex"] if binds_apex else []
    return _lines(line, [f"import {', '.join(aliases)}"] if aliases else [], [f"import {n}" for n in left], left)


def _import_from(line: Line, statement: cst.ImportFrom) -> Line | cst.FlattenSentinel[Line]:
    if statement.relative or statement.module is None:
        return line
    module = code_of(statement.module)
    if not _ours(module):
        return line
    new = _renamed(module)
    if isinstance(statement.names, cst.ImportStar):
        names: list[str] = []
    else:
        names = [code_of(alias.name) for alias in statement.names]
    bad = [f"{module}.{name}" for name in names if verdict(f"{module}.{name}").verdict == UNSUPPORTED]
    if new is None or (bad and len(bad) == len(names)):
        return _unsupported(line, bad or [module])
    if not bad:
        return line.with_changes(body=[statement.with_changes(module=cst.parse_expression(new))])
    if isinstance(statement.names, cst.ImportStar):
        return line
    good: list[str] = []
    left: list[str] = []
    for alias, name in zip(statement.names, names, strict=True):
        asname = f" as {code_of(alias.asname.name)}" if alias.asname else ""
        (left if f"{module}.{name}" in bad else good).append(name + asname)
    return _lines(line, [f"from {new} import {', '.join(good)}"], [f"from {module} import {', '.join(left)}"], bad)


def _lines(line: Line, new: list[str], left: list[str], names: list[str]) -> Line | cst.FlattenSentinel[Line]:
    made: list[Line] = []
    for text in [*new, *left]:
        (part,) = cst.ensure_type(cst.parse_statement(text), Line).body
        made.append(Line([part]))
    if left:
        made[len(new)] = _unsupported(made[len(new)], [name.partition(" ")[0] for name in names])
    if len(made) == 1 and left and made[0].body[0].deep_equals(line.body[0]):
        return _unsupported(line, [name.partition(" ")[0] for name in names])
    made[0] = made[0].with_changes(leading_lines=[*line.leading_lines, *made[0].leading_lines])
    made[-1] = made[-1].with_changes(trailing_whitespace=line.trailing_whitespace)
    return made[0] if len(made) == 1 else cst.FlattenSentinel(made)
