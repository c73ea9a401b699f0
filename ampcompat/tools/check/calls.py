"""Which function of a file a call runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import Source, once

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def function_of(source: Source, call: ast.Call) -> Definition | None:
    """The function of the same file that a call runs: ``clip(...)``, or ``self.clip()`` of the class around it."""
    if isinstance(call.func, ast.Name):
        return _functions(source).get((source.tree, call.func.id))
    if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self":
        around = class_around(source, call)
        return None if around is None else _functions(source).get((around, call.func.attr))
    return None


def class_around(source: Source, node: ast.AST) -> ast.ClassDef | None:
    """The innermost class that a node stands in; None for none."""
    return next((part for part in source.ancestors(node) if isinstance(part, ast.ClassDef)), None)


@once
def calls_by_function(source: Source) -> dict[ast.AST, list[ast.Call]]:
    """The calls of each function of the same file."""
    found: dict[ast.AST, list[ast.Call]] = {}
    for call in source.calls:
        function = function_of(source, call)
        if function is not None:
            found.setdefault(function, []).append(call)
    return found


@once
def _functions(source: Source) -> dict[tuple[ast.AST, str], Definition]:
    """The functions of a module and of its classes, by what they are defined in and by name."""
    kinds: Iterator[Definition] = source.kind(ast.FunctionDef, ast.AsyncFunctionDef)
    return {(source.parents[function], function.name): function for function in kinds}
