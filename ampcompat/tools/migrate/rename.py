"""``--to ampcompat``: ``apex`` becomes ``ampcompat`` in import statements and in probes by name.

Nothing else changes; what is used and not provided is marked, at the import and at each use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.findings import UNSUPPORTED
from ampcompat.tools.check.libraries import uses_of_apex
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.symbols import canonical, verdict
from ampcompat.tools.migrate.edits import Edits
from ampcompat.tools.migrate.mentions import is_apex, listed, looked_for, mentions, probes
from ampcompat.tools.migrate.result import Result

#: What to do where a library imports apex itself.
OF_LIBRARY = "the library imports apex itself; call ampcompat.install_as_apex() above the import of that library"


def rewrite_imports(source: Source) -> Result:
    """The source with its apex imports renamed."""
    edits = Edits(source)
    for plain in source.kind(ast.Import):
        _import(plain, edits)
    for statement in source.kind(ast.ImportFrom):
        _import_from(statement, edits)
    for text in probes(source):
        name = str(text.value)
        new = _renamed(name)
        if new is not None:
            edits.replace(text, edits.text(text).replace(name, new))
    for text in looked_for(source, ("sys.modules",)):
        new = _renamed(str(text.value)) or "what takes its place"
        edits.mark(text, f"{text.value!s} is looked for by its name; look for {new}, or leave the test out")
    for node, symbol in mentions(source):
        if verdict(symbol).verdict == UNSUPPORTED:
            edits.mark(node, f"{canonical(symbol)} is not provided: {verdict(symbol).note}")
    for use, name in uses_of_apex(source):
        if not isinstance(use, ast.alias):  # the import of a name says nothing that its use does not
            edits.note(use, f"{name}: {OF_LIBRARY}")
    return edits.apply()


def _renamed(name: str) -> str | None:
    """``apex.amp`` as ``ampcompat.amp``; None for other packages and for what has no counterpart."""
    root, _, rest = name.partition(".")
    if not is_apex(name) or verdict(name).verdict == UNSUPPORTED:
        return None
    if root in EXTENSIONS:
        return f"ampcompat.{name}"
    return f"ampcompat.{rest}" if rest else "ampcompat"


def _import(node: ast.Import, edits: Edits) -> None:
    """``import apex.amp``: each alias on its own, since the plain form binds ``apex``, which other lines read."""
    if not any(is_apex(alias.name) for alias in node.names):
        return
    good: list[str] = []
    left: list[ast.alias] = []
    binds_apex = False
    for alias in node.names:
        new = _renamed(alias.name) if is_apex(alias.name) else alias.name
        if new is None:
            left.append(alias)
        elif alias.asname or not is_apex(alias.name):
            good.append(f"{new} as {alias.asname}" if alias.asname else new)
        elif alias.name in EXTENSIONS:
            good.append(f"{new} as {alias.name}")
        else:
            good += [new] if "." in new else []
            binds_apex = True
    if binds_apex:
        good.append("ampcompat as apex")
    _put(
        node,
        f"import {', '.join(good)}" if good else "",
        f"import {listed(left)}" if left else "",
        [alias.name for alias in left],
        edits,
    )


def _import_from(node: ast.ImportFrom, edits: Edits) -> None:
    if node.level or node.module is None or not is_apex(node.module):
        return
    new = _renamed(node.module)
    named = [alias for alias in node.names if alias.name != "*"]
    unsupported = [alias for alias in named if verdict(f"{node.module}.{alias.name}").verdict == UNSUPPORTED]
    if new is not None and not unsupported:
        edits.replace(node, edits.text(node).replace(node.module, new, 1))
        return
    names = [f"{node.module}.{alias.name}" for alias in unsupported] or [node.module]
    good = [alias for alias in node.names if alias not in unsupported]
    if new is None or not good:
        _put(node, "", edits.text(node), names, edits)
        return
    _put(node, f"from {new} import {listed(good)}", f"from {node.module} import {listed(unsupported)}", names, edits)


def _put(node: ast.stmt, good: str, left: str, names: Iterable[str], edits: Edits) -> None:
    """Replace an import by one of ampcompat and by what is left of apex, under a mark."""
    message = "; ".join(f"{name} is not provided: {verdict(name).note}" for name in names)
    if good:
        edits.replace_statement(node, [good], left, message)
    else:
        edits.mark(node, message)
