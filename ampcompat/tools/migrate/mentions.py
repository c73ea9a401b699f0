"""Where a source names apex outside of imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.source import Source

PROBES = ("find_spec", "import_module", "__import__")
#: What asks for an installed distribution.
INSTALLED = ("version", "get_distribution", "distribution", "find_loader")
_NAME = re.compile(r"apex(\.\w+)*")
Mention = ast.Name | ast.Attribute


def is_apex(name: str) -> bool:
    """Whether a dotted name is of apex or of its extensions."""
    return name.partition(".")[0] in ("apex", *EXTENSIONS)


def listed(aliases: Iterable[ast.alias]) -> str:
    """Names as an import lists them."""
    return ", ".join(f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in aliases)


def mentions(source: Source) -> Iterator[tuple[Mention, str]]:
    """Names and attributes that mean something of apex, the longest chain of each, with what they mean."""
    names: list[Mention] = [*source.kind(ast.Name), *source.kind(ast.Attribute)]
    for node in names:
        if isinstance(source.parents.get(node), ast.Attribute):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            continue
        symbol = source.apex(node)
        if symbol is not None:
            yield node, symbol


def looked_for(source: Source, places: Iterable[str]) -> Iterator[ast.Constant]:
    """Names of apex in other tests for it, such as ``optional_import("apex.amp")`` and ``"apex" in sys.modules``.

    Args:
        source: The parsed source.
        places: Where it is looked for, as the source names them.
    """
    known = set(probes(source, (*PROBES, *INSTALLED)))
    for text in source.kind(ast.Constant):
        if not isinstance(text.value, str) or text in known or not _NAME.fullmatch(text.value):
            continue
        parent = source.parents.get(text)
        is_module_given = isinstance(parent, ast.Call) and "." in text.value
        if is_module_given or _is_looked_up(text, parent, places) or _is_probed_by_variable(text, source):
            yield text


def _is_looked_up(text: ast.Constant, parent: ast.AST | None, places: Iterable[str]) -> bool:
    """Whether it is asked for as in ``"apex" in sys.modules``."""
    if not isinstance(parent, ast.Compare) or parent.left is not text:
        return False
    return isinstance(parent.ops[0], ast.In | ast.NotIn) and ast.unparse(parent.comparators[0]) in places


def _is_probed_by_variable(text: ast.Constant, source: Source) -> bool:
    """Whether its statement probes for names, as in ``all(find_spec(name) for name in ("apex", "torch"))``."""
    statement: ast.AST | None = text
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = source.parents.get(statement)
    inside = set() if statement is None else set(ast.walk(statement))
    calls = (call for call in source.calls_named(*PROBES) if call in inside)
    return any(call.args and isinstance(call.args[0], ast.Name) for call in calls)


def probes(source: Source, functions: Iterable[str] = PROBES) -> Iterator[ast.Constant]:
    """The names in ``find_spec("apex")`` and ``import_module("apex.amp")``."""
    for call in source.calls_named(*functions):
        if not call.args:
            continue
        text = call.args[0]
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.partition(".")[0] == "apex":
            yield text
