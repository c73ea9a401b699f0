"""What a name of a function was given by the last assignment above."""

from __future__ import annotations

import ast
import bisect

from ampcompat.tools.check.branches import conditions
from ampcompat.tools.check.source import Source, once


def value_above(source: Source, name: ast.Name) -> ast.expr | None:
    """What the last assignment above gives ``name`` in its function; None if there is none."""
    values = _assigned(source).get((source.scope(name), name.id), [])
    above = bisect.bisect_left(values, name.lineno, key=lambda value: value.end_lineno or 0)
    return values[above - 1] if above else None


def certain_value(source: Source, name: ast.Name) -> ast.expr | None:
    """What ``name`` was given above in every case: not under a test that does not hold for ``name`` too."""
    value = value_above(source, name)
    if value is None or not conditions(source, value) <= conditions(source, name):
        return None
    return value


@once
def _assigned(source: Source) -> dict[tuple[ast.AST, str], list[ast.expr]]:
    """What each name of a function is given, in the order of lines."""
    found: dict[tuple[ast.AST, str], list[ast.expr]] = {}
    for node in sorted(source.kind(ast.Assign), key=lambda node: node.lineno):
        for target in node.targets:
            if isinstance(target, ast.Name):
                found.setdefault((source.scope(node), target.id), []).append(node.value)
    return found
