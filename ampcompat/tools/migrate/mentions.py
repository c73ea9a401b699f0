"""Where a source names apex outside of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.source import Source

PROBES = ("find_spec", "import_module", "__import__")
#: What asks for an installed distribution.
INSTALLED = ("version", "get_distribution", "distribution", "find_loader")
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


def probes(source: Source, functions: Iterable[str] = PROBES) -> Iterator[ast.Constant]:
    """The names in ``find_spec("apex")`` and ``import_module("apex.amp")``."""
    for call in source.calls_named(*functions):
        if not call.args:
            continue
        text = call.args[0]
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.partition(".")[0] == "apex":
            yield text
