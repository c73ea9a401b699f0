"""The models that ``amp.initialize`` is given, by the names that a file has for them."""

from __future__ import annotations

import ast

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.initializations import initializing_calls
from ampcompat.tools.check.source import Source, argument, listed, once


@once
def initialized_models(source: Source) -> frozenset[str]:
    """The names of what ``initialize`` is given and returns as models, and of what these are wrapped in."""
    names: set[str] = set()
    for call in initializing_calls(source):
        returned = _returned_models(source, call)
        for models in (argument(call, 0, "models"), returned):
            names |= {dotted(model) for model in listed(models)} - {""}
    waiting = list(names)
    for known in waiting:  # grows on the way
        found = [name for name, values in source.assigned.items() if known in map(_wrapped, values)]
        waiting += [name for name in found if name not in names]
        names |= set(found)
    return frozenset(names)


def _returned_models(source: Source, call: ast.Call) -> ast.expr | None:
    """What a call's models are assigned to."""
    statement = source.statement(call)
    returned = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(returned, ast.Tuple) and argument(call, 1, "optimizers") is not None:
        return returned.elts[0]
    return returned


def _wrapped(value: ast.expr) -> str:
    """The name of what ``value`` is, or wraps: ``model`` of ``DataParallel(model)`` and of ``model``."""
    if isinstance(value, ast.Call):
        return dotted(value.args[0]) if value.args else ""
    return dotted(value)


def may_be_initialized(source: Source, model: str) -> bool:
    """Whether a name may be that of a model that ``initialize`` got.

    Where the file initializes none, any may be. Else one is not that the file makes by a call, and never gives to it.
    """
    names = initialized_models(source)
    if not initializing_calls(source) or {model, model.removesuffix(".module")} & names:
        return True
    values = source.assigned.get(model, [])
    return not values or not all(isinstance(value, ast.Call) for value in values)
