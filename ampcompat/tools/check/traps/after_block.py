"""Traps below a block of ``amp.scale_loss``: its gradients are unscaled, and copied to masters where there are some."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import conditions, exclusive
from ampcompat.tools.check.findings import WARNING
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.settings import Setting
from ampcompat.tools.check.source import Source, called
from ampcompat.tools.check.traps.blocks import CLIPS, With, block_above, blocks_by_function, follows_a_block, yielded
from ampcompat.tools.check.traps.grades import with_masters, with_masters_or_scale


def clip_of_model_params(source: Source) -> Iterator[Mistake]:
    """Clipping ``model.parameters()`` after a block, where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    if source.bindings.is_native:  # it has no masters
        return
    note = "the optimizer steps master parameters, so that this changes nothing; clip amp.master_params(optimizer)"
    # A function that clips master_params too has a branch for each precision.
    clip_masters = {source.scope(call) for call in source.calls_to("apex.amp.master_params")}
    for call in source.calls_named(*CLIPS):
        if _is_of_model(call) and source.scope(call) not in clip_masters and follows_a_block(source, call):
            yield Mistake(call, note, _grade_after_block(source, call))


def _is_of_model(call: ast.Call) -> bool:
    """Whether a call clips ``model.parameters()``."""
    given = call.args[0] if call.args else None
    return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"


def edit_of_model_gradients(source: Source) -> Iterator[Mistake]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    if source.bindings.is_native:  # it has no masters
        return
    note = "the optimizer steps masters, so that this changes nothing; edit amp.master_params(optimizer)"
    edit_masters = {source.scope(call) for call in source.calls_to("apex.amp.master_params")}
    for loop in source.kind(ast.For):
        if not isinstance(loop.iter, ast.Call) or called(loop.iter) not in ("parameters", "named_parameters"):
            continue
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        if edit is not None and source.scope(loop) not in edit_masters and follows_a_block(source, loop):
            yield Mistake(edit, note, _grade_after_block(source, edit))


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


def _with_masters_if_it_runs(setting: Setting) -> str | None:
    """A warning where the optimizer steps masters, for code that may not run at such a level."""
    return WARNING if with_masters(setting) else None


def _grade_after_block(source: Source, node: ast.AST) -> Grade:
    """How bad a change of the model's own gradients is: code under ``if opt_level == ...`` may know what it does."""
    asks_for_level = any("opt_level" in test.lower() for test, _ in conditions(source, node))
    return _with_masters_if_it_runs if asks_for_level else with_masters


def backward_after_block(source: Source) -> Iterator[Mistake]:
    """``scaled_loss.backward()`` below the block of ``amp.scale_loss(...) as scaled_loss``.

    The block has ended, so that nothing unscales these gradients or brings them to the masters.
    """
    for call in source.calls_named("backward"):
        scaled = dotted(call.func).rpartition(".")[0]
        block = block_above(blocks_by_function(source).get(source.scope(call), []), call)
        if block is None or scaled not in yielded(block) or _is_in_block_that_yields(source, call, scaled):
            continue
        if not exclusive(source, block, call) and not _is_assigned_below(source, block, call, scaled):
            note = f"the block that unscales its gradients has ended; indent {scaled}.backward() into it"
            yield Mistake(call, note, with_masters_or_scale)


def _is_in_block_that_yields(source: Source, node: ast.AST, name: str) -> bool:
    around = source.ancestors(node)
    return any(isinstance(block, ast.With | ast.AsyncWith) and name in yielded(block) for block in around)


def _is_assigned_below(source: Source, block: With, node: ast.Call, name: str) -> bool:
    """Whether ``name`` is given something else between a block and a node."""
    for statement in source.kind(ast.Assign):
        if block.lineno < statement.lineno <= node.lineno and name in map(dotted, statement.targets):
            return True
    return False
