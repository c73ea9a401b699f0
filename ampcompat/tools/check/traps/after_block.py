"""Traps below a block of ``amp.scale_loss``: its gradients are unscaled, and copied to masters where there are some."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import asks_for_level, contradict
from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.traps.blocks import CLIPS, block_above, blocks_by_function, follows_a_block, yielded
from ampcompat.tools.check.traps.grades import with_masters, with_masters_or_scale
from ampcompat.tools.check.traps.models import is_initialized_by_class


def clip_of_model_params(source: Source) -> Iterator[Mistake]:
    """Clipping ``model.parameters()`` after a block, where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    note = "the optimizer steps master parameters, so that this changes nothing; clip amp.master_params(optimizer)"
    for call in source.calls_named(*CLIPS):
        model = _model_of(call.args[0]) if call.args else ""
        if model and _is_after_backward(source, call, model):
            yield Mistake(call, note, with_masters)


def edit_of_model_gradients(source: Source) -> Iterator[Mistake]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    note = "the optimizer steps masters, so that this changes nothing; edit amp.master_params(optimizer)"
    for loop in source.kind(ast.For):
        model = _model_of(loop.iter)
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        if model and edit is not None and _is_after_backward(source, loop, model):
            yield Mistake(edit, note, with_masters)


def _model_of(node: ast.expr) -> str:
    """The model whose ``parameters()`` or ``named_parameters()`` an expression is; ``"?"`` if it has no name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    return (dotted(node.func.value) or "?") if node.func.attr in ("parameters", "named_parameters") else ""


def _is_after_backward(source: Source, node: ast.expr | ast.stmt, model: str) -> bool:
    """Whether ``node`` handles the gradients of ``model`` after they were brought to masters, if there are some.

    A function that handles those of masters too has a branch for each precision, and code under a test of the level
    knows what it does.
    """
    if source.bindings.is_native:  # it has no masters
        return False
    knows_masters = any(source.scope(call) is source.scope(node) for call in source.calls_to("apex.amp.master_params"))
    if knows_masters or asks_for_level(source, node):
        return False
    return follows_a_block(source, node) or is_initialized_by_class(source, node, model)


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
