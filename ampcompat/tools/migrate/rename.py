"""``--to ampcompat``: ``apex`` becomes ``ampcompat`` in import statements and in probes by name.

Nothing else changes; what is used and not provided is marked, at the import and at each use.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.findings import UNSUPPORTED
from ampcompat.tools.check.symbols import canonical, verdict
from ampcompat.tools.migrate.native.edits import Edits, Statement
from ampcompat.tools.migrate.native.file import File
from ampcompat.tools.migrate.native.leftovers import apex_mentions
from ampcompat.tools.migrate.native.nodes import last_name
from ampcompat.tools.migrate.result import MARK, Result
from ampcompat.tools.migrate.text import INSTALL_APEX, code_of

PROBES = ("find_spec", "import_module", "__import__")


def rewrite_imports(code: str) -> Result:
    """The source with its apex imports renamed."""
    file = File(cst.parse_module(code))
    edits = Edits()
    for node in file.nodes:
        if isinstance(node, cst.Import):
            _import(node, file, edits)
        elif isinstance(node, cst.ImportFrom):
            _import_from(node, file, edits)
        elif isinstance(node, cst.Call):
            _probe(node, edits)
        elif isinstance(node, cst.SimpleString) and INSTALL_APEX.search(node.value):
            edits.note(f"{node.value} tells users to install apex; this needs ampcompat now")
    _mark_uses(file, edits)
    result = Result.of(edits.apply(file).code)
    result.notes = edits.notes
    return result


def _renamed(name: str) -> str | None:
    """``apex.amp`` as ``ampcompat.amp``; None for other packages and for what has no counterpart."""
    root, _, rest = name.partition(".")
    if not _is_apex(name) or verdict(name).verdict == UNSUPPORTED:
        return None
    if root in EXTENSIONS:
        return f"ampcompat.{name}"
    return f"ampcompat.{rest}" if rest else "ampcompat"


def _is_apex(name: str) -> bool:
    return name.partition(".")[0] in ("apex", *EXTENSIONS)


def _import(node: cst.Import, file: File, edits: Edits) -> None:
    """``import apex.amp``: each alias on its own, since the plain form binds ``apex``, which other lines read."""
    names = [code_of(alias.name) for alias in node.names]
    if not any(map(_is_apex, names)):
        return
    good: list[str] = []
    left: list[str] = []
    binds_apex = False
    for alias, name in zip(node.names, names, strict=True):
        asname = f" as {code_of(alias.asname.name)}" if alias.asname is not None else ""
        new = _renamed(name) if _is_apex(name) else name
        if new is None:
            left.append(name + asname)
        elif asname or not _is_apex(name):
            good.append(new + asname)
        elif name in EXTENSIONS:
            good.append(f"{new} as {name}")
        else:
            good += [new] if "." in new else []
            binds_apex = True
    if binds_apex:
        good.append("ampcompat as apex")
    _put(
        node,
        f"import {', '.join(good)}" if good else "",
        [f"import {name}" for name in left],
        [name.partition(" ")[0] for name in left],
        file,
        edits,
    )


def _import_from(node: cst.ImportFrom, file: File, edits: Edits) -> None:
    if node.relative or node.module is None or not _is_apex(code_of(node.module)):
        return
    module = code_of(node.module)
    new = _renamed(module)
    aliases = [] if isinstance(node.names, cst.ImportStar) else list(node.names)
    unsupported = [a for a in aliases if verdict(f"{module}.{code_of(a.name)}").verdict == UNSUPPORTED]
    if new is not None and not unsupported:
        renamed = node.with_changes(module=cst.parse_expression(new))
        edits.statements[node] = lambda _: [renamed]
        return
    names = [f"{module}.{code_of(alias.name)}" for alias in unsupported] or [module]
    good = [alias for alias in aliases if alias not in unsupported]
    if new is None or not good:
        _put(node, "", [], names, file, edits)
        return
    _put(
        node,
        f"from {new} import {_listed(good)}",
        [f"from {module} import {_listed(unsupported)}"],
        names,
        file,
        edits,
    )


def _listed(aliases: Sequence[cst.ImportAlias]) -> str:
    return ", ".join(code_of(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for alias in aliases)


def _put(
    node: cst.Import | cst.ImportFrom, good: str, left: list[str], names: list[str], file: File, edits: Edits
) -> None:
    """Replace an import by one of ampcompat and by what is left of apex, under a mark."""
    message = "; ".join(f"{name} is not provided: {verdict(name).note}" for name in names)
    line = file.line_of(node)
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    if not good or not alone:
        if names:
            edits.mark(line, message)
        if good:
            edits.statements[node] = lambda _: [_small(code) for code in (good, *left)]
        return
    edits.statements[node] = lambda _: _lines(good, left, message)


def _lines(good: str, left: list[str], message: str) -> list[Statement]:
    lines: list[Statement] = [_small(good)]
    for index, code in enumerate(left):
        mark = [cst.EmptyLine(comment=cst.Comment(MARK + message))] if index == 0 else []
        lines.append(cst.SimpleStatementLine([_small(code)], leading_lines=mark))
    return lines


def _small(code: str) -> cst.BaseSmallStatement:
    return cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine).body[0]


def _probe(call: cst.Call, edits: Edits) -> None:
    """``find_spec("apex")``."""
    if last_name(call.func) not in PROBES or not call.args:
        return
    value = call.args[0].value
    name = str(value.raw_value) if isinstance(value, cst.SimpleString) else ""
    new = _renamed(name) if name.partition(".")[0] == "apex" else None
    if new is not None and isinstance(value, cst.SimpleString):
        renamed = value.with_changes(value=value.value.replace(name, new))
        edits.expressions[value] = lambda _: renamed


def _mark_uses(file: File, edits: Edits) -> None:
    """Mark each use of a name that is not provided; imports are marked where they are renamed."""
    for node, symbol in apex_mentions(file):
        if verdict(symbol).verdict == UNSUPPORTED:
            edits.mark(file.statement(node), f"{canonical(symbol)} is not provided: {verdict(symbol).note}")
