"""Traps below a block of ``amp.scale_loss``: its gradients are unscaled, and copied to masters where there are some."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.assigned import certain_value
from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import asks_for_level, contradict
from ampcompat.tools.check.calls import calls_by_function
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.source import Source, called
from ampcompat.tools.check.traps.blocks import block_above, blocks_by_function, clips, follows_a_block, is_clip, yielded
from ampcompat.tools.check.traps.grades import perhaps_with_masters, with_masters, with_masters_or_scale
from ampcompat.tools.check.traps.models import is_initialized_by_class
from ampcompat.tools.check.traps.other_models import is_another_model

#: What makes a list of its last argument, or leaves out some of it.
LISTS = ("list", "tuple", "set", "filter", "chain")


def clip_of_model_params(source: Source) -> Iterator[Mistake]:
    """Clipping ``model.parameters()`` after a block, where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    note = "the optimizer steps master parameters, so that this changes nothing; clip amp.master_params(optimizer)"
    for call in clips(source):
        model = _model_of(source, call.args[0]) if call.args else ""
        grade = _grade_of_change(source, call, model) if model else None
        if grade is not None:
            yield Mistake(call, note, grade)


def edit_of_model_gradients(source: Source) -> Iterator[Mistake]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    note = "the optimizer steps masters, so that this changes nothing; edit amp.master_params(optimizer)"
    for loop in source.kind(ast.For):
        model = _model_of(source, loop.iter)
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        grade = _grade_of_change(source, loop, model) if model and edit is not None else None
        if edit is not None and grade is not None:
            yield Mistake(edit, note, grade)


def _model_of(source: Source, node: ast.expr | None) -> str:
    """The model whose ``parameters()`` or ``named_parameters()`` an expression is, or lists or filters.

    ``"?"`` if the model has no name, and "" if the expression is something else.
    """
    while node is not None:
        if isinstance(node, ast.Name):
            node = certain_value(source, node)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            node = node.generators[0].iter
        elif isinstance(node, ast.BinOp):  # a sum of lists
            node = node.left
        elif not isinstance(node, ast.Call):
            return ""
        elif called(node) in ("parameters", "named_parameters"):
            return dotted(node.func).rpartition(".")[0] or "?"
        else:
            node = node.args[-1] if node.args and called(node) in LISTS else None
    return ""


def _grade_of_change(source: Source, node: ast.expr | ast.stmt, model: str) -> Grade | None:
    """How bad it is that ``node`` changes gradients of ``model``; None where that may be before masters get theirs.

    A function that does the same to the gradients of masters has a branch for each precision, and code under a test of
    the level knows what it does.
    """
    if source.bindings.is_native or is_another_model(source, node, model):  # it has no masters
        return None
    scope = source.scope(node)
    if _does_so_with_masters(source, node) or asks_for_level(source, node):
        return None
    if follows_a_block(source, node) or is_initialized_by_class(source, node, model):
        return with_masters
    is_given = source.is_parameter(model.partition(".")[0], node)
    is_called_after = any(follows_a_block(source, call) for call in calls_by_function(source).get(scope, []))
    return perhaps_with_masters if is_given and is_called_after else None


def _does_so_with_masters(source: Source, node: ast.expr | ast.stmt) -> bool:
    """Whether the function around a change of gradients takes masters, for something else than a clip if it is none."""
    for call in source.calls_to("apex.amp.master_params"):
        around = source.parents.get(call)
        is_for_clip = isinstance(around, ast.Call) and is_clip(source, around)
        if source.scope(call) is source.scope(node) and (isinstance(node, ast.Call) or not is_for_clip):
            return True
    return False


def _edited(node: ast.AST) -> str:
    """The name of the parameter whose gradient a node changes, to something else than nothing: ``p`` of ``p.grad``."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr.endswith("_") and node.func.attr not in ("zero_", "detach_", "requires_grad_"):
            changed = node.func.value
    elif isinstance(node, ast.AugAssign):
        changed = node.target
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
        changed = node.targets[0]
    name, _, attribute = dotted(changed).removesuffix(".data").rpartition(".")
    return name if attribute == "grad" else ""


def backward_after_block(source: Source) -> Iterator[Mistake]:
    """``scaled_loss.backward()`` below the block of ``amp.scale_loss(...) as scaled_loss``.

    The block has ended, so that nothing unscales these gradients or brings them to the masters.
    """
    for call in source.calls_named("backward"):
        scaled = dotted(call.func).rpartition(".")[0]
        block = block_above(blocks_by_function(source).get(source.scope(call), []), call)
        if block is None or scaled not in yielded(block) or _is_in_block_that_yields(source, call, scaled):
            continue
        if not contradict(source, block, call):
            note = f"the block that unscales its gradients has ended; indent {scaled}.backward() into it"
            yield Mistake(call, note, with_masters_or_scale)


def _is_in_block_that_yields(source: Source, node: ast.AST, name: str) -> bool:
    around = source.ancestors(node)
    return any(isinstance(block, ast.With | ast.AsyncWith) and name in yielded(block) for block in around)
