"""Models that a file visibly never gives to ``amp.initialize``: a teacher, or the discriminator beside a generator."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.calls import class_around, function_of
from ampcompat.tools.check.settings import initializations
from ampcompat.tools.check.source import Source, called, once
from ampcompat.tools.check.traps.models import RETURN_MODEL, models_of
from ampcompat.tools.check.values import given_values

#: Methods of a model that hand out neither it nor a part of it that ``amp.initialize`` takes.
HAND_OUT_NO_MODEL = ("parameters", "named_parameters", "zero_grad", "state_dict", "load_state_dict")
WRAPPERS = ("DataParallel", "DistributedDataParallel")


@once
def is_another_model(source: Source, node: ast.AST, model: str) -> bool:
    """Whether a name means a model that the file makes of no other one, and hands to nothing.

    Then ``amp.initialize`` cannot have got it, and no model that it got can have a part in common with it.
    """
    values = given_values(source).get(model, [])
    if not values or not initializations(source) or source.is_parameter(model, node):
        return False
    uses = [name for name in source.kind(ast.Name) if name.id == model and isinstance(name.ctx, ast.Load)]
    is_made_alone = all(value is not None and _is_made_alone(source, value, model) for value in values)
    return is_made_alone and all(_keeps_to_itself(source, use) for use in uses)


def _is_made_alone(source: Source, value: ast.expr, model: str) -> bool:
    """Whether a value is a new model, or ``model`` itself, either perhaps moved or wrapped: ``Net(8).cuda()``."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and called(value) in RETURN_MODEL:
        value = value.func.value
    if not isinstance(value, ast.Call):
        return dotted(value) == model
    if called(value) in WRAPPERS:
        return bool(value.args) and dotted(value.args[0]) == model
    initializing = {getattr(class_around(source, call), "name", "") for call in initializations(source)}
    is_class = called(value)[:1].isupper() and called(value) not in initializing
    parts = [part for part in source.within(value) if isinstance(part, ast.Name)]
    return is_class and all(part in source.within(value.func) or _is_no_model(source, part) for part in parts)


def _is_no_model(source: Source, name: ast.Name) -> bool:
    """Whether a name means a part of torch, a literal, or the options of a command line."""
    if source.full_name(name).partition(".")[0] == "torch":
        return True
    values = given_values(source).get(name.id, [])
    options = [isinstance(value, ast.Call) and called(value) == "parse_args" for value in values]
    literals = [isinstance(value, ast.Constant) for value in values]
    return bool(values) and not source.is_parameter(name.id, name) and (all(options) or all(literals))


def _keeps_to_itself(source: Source, use: ast.Name) -> bool:
    """Whether a use of a model hands it to nothing that could keep it."""
    statement = source.statement(use)
    if isinstance(statement, ast.Assign) and [dotted(target) for target in statement.targets] == [use.id]:
        return True  # it is judged as a value of the name
    parent = source.parents[use]
    if isinstance(parent, ast.Call):
        return parent.func is use
    call = source.parents[parent]
    if not isinstance(parent, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not parent:
        return False
    return parent.attr in HAND_OUT_NO_MODEL or isinstance(source.parents[call], ast.Expr)


# -- losses ------------------------------------------------------------------------------------------------------------
def is_loss_of_another_model(source: Source, loss: ast.expr) -> bool:
    """Whether a loss comes from such a model, and from none that ``amp.initialize`` got, unless by ``detach()``."""
    names, calls = _origins(source, loss)
    is_followed = not any(source.is_parameter(name.id, name) for name in names)
    if not is_followed or any(function_of(source, call) is not None for call in calls):
        return False
    initialized = {model for call in initializations(source) for model in models_of(source, call)}
    if any(name.id in initialized for name in names):
        return False
    return any(is_another_model(source, loss, name.id) for name in names)


def _origins(source: Source, loss: ast.expr) -> tuple[list[ast.Name], list[ast.Call]]:
    """The names and the calls that a loss is computed with, by whatever the file gives to those names."""
    names: dict[str, ast.Name] = {}
    calls: list[ast.Call] = []
    waiting: list[ast.AST] = [loss]
    for node in waiting:  # grows on the way
        if isinstance(node, ast.Call) and called(node) == "detach":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call):
            calls.append(node)
        if isinstance(node, ast.Name) and node.id not in names:
            names[node.id] = node
            waiting += _flows_into(source).get(node.id, [])
    return list(names.values()), calls


@once
def _flows_into(source: Source) -> dict[str, list[ast.expr]]:
    """What each name of a file is given, in whole or in part: by assignments, loops, ``with``, and ``append``."""
    assignments: Iterator[ast.AugAssign | ast.AnnAssign | ast.NamedExpr]
    assignments = source.kind(ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
    loops: Iterator[ast.For | ast.AsyncFor | ast.comprehension]
    loops = source.kind(ast.For, ast.AsyncFor, ast.comprehension)
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    pairs += [(target, node.value) for node in source.kind(ast.Assign) for target in node.targets]
    pairs += [(assignment.target, assignment.value) for assignment in assignments]
    pairs += [(loop.target, loop.iter) for loop in loops]
    pairs += [(item.optional_vars, item.context_expr) for item in source.kind(ast.withitem)]
    pairs += [(call.func, given) for call in source.calls_named("append", "extend") for given in call.args]
    found: dict[str, list[ast.expr]] = {}
    for target, value in pairs:
        if target is None or value is None:
            continue
        for name in source.within(target):
            if isinstance(name, ast.Name):
                found.setdefault(name.id, []).append(value)
    return found
