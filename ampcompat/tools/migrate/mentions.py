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
_APEX_NAME = re.compile(r"apex(\.\w+)*")
#: In the names of functions that look for modules.
_ASKS = re.compile(r"import|avail|installed|module|spec|exist", re.IGNORECASE)
Mention = ast.Name | ast.Attribute


def is_apex(name: str) -> bool:
    """Whether a dotted name is of apex or of its extensions."""
    return name.partition(".")[0] in ("apex", *EXTENSIONS)


def last_name(node: ast.AST) -> str:
    """``find_spec`` of ``importlib.util.find_spec``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


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
    """Names of apex that the script asks for otherwise, as in ``optional_import("apex.amp")``.

    Args:
        source: The parsed source.
        places: Where it may ask for them, as in ``"apex" in sys.modules``.
    """
    known = set(probes(source, (*PROBES, *INSTALLED)))
    for text in source.kind(ast.Constant):
        if not isinstance(text.value, str) or text in known or not _APEX_NAME.fullmatch(text.value):
            continue
        if _is_asked_for(text, source, places) or _is_probed_by_variable(text, source):
            yield text


def _is_asked_for(text: ast.Constant, source: Source, places: Iterable[str]) -> bool:
    """Whether a function that looks for modules is given it, or it is looked up in one of ``places``."""
    parent = source.parents.get(text)
    if isinstance(parent, ast.Call):
        return _ASKS.search(last_name(parent.func)) is not None
    if not isinstance(parent, ast.Compare) or parent.left is not text:
        return False
    return isinstance(parent.ops[0], ast.In | ast.NotIn) and ast.unparse(parent.comparators[0]) in places


def _is_probed_by_variable(text: ast.Constant, source: Source) -> bool:
    """Whether it is one of the names in ``all(find_spec(name) for name in ("apex", "torch"))``, or in such a loop."""
    names: ast.AST | None = source.parents.get(text)
    loop = source.parents.get(names) if isinstance(names, ast.Tuple | ast.List | ast.Set) else None
    if not isinstance(loop, ast.comprehension | ast.For) or loop.iter is not names:
        return False
    around = source.parents.get(loop) if isinstance(loop, ast.comprehension) else loop
    inside = set() if around is None else set(ast.walk(around))
    calls = [call for call in source.calls_named(*PROBES) if call in inside and call.args]
    return any(ast.unparse(call.args[0]) == ast.unparse(loop.target) for call in calls)


def probes(source: Source, functions: Iterable[str] = PROBES) -> Iterator[ast.Constant]:
    """The names in ``find_spec("apex")`` and ``import_module("apex.amp")``."""
    for call in source.calls_named(*functions):
        if not call.args:
            continue
        text = call.args[0]
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.partition(".")[0] == "apex":
            yield text
