"""Traps of the training loop: clipping and backward passes at ``amp.scale_loss``."""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterator
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import exclusive
from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.source import Source, called, once
from ampcompat.tools.check.traps.repository import Repository

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
With: TypeAlias = ast.With | ast.AsyncWith


def clip_of_model_params(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping ``model.parameters()`` after a block, where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    if source.bindings.is_native or not repository.may_run_at("O2", "O5"):
        return
    level = WARNING if repository.levels is None else ERROR
    note = "at O2 the optimizer steps master parameters; clip amp.master_params(optimizer) instead"
    # A function that clips master_params too has a branch for each precision.
    clip_masters = {source.scope(call) for call in source.calls_to("apex.amp.master_params")}
    for call in source.calls_named(*CLIPS):
        if _is_of_model(call) and source.scope(call) not in clip_masters and _follows_a_block(source, call):
            yield source.finding(call, "trap", "clip_of_model_params", level, note)


def edit_of_model_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    if source.bindings.is_native or repository.levels is None or not repository.may_run_at("O2", "O5"):
        return
    note = "at O2 the optimizer steps masters: this changes nothing; edit amp.master_params(optimizer)"
    for loop in source.kind(ast.For):
        if not isinstance(loop.iter, ast.Call) or called(loop.iter) not in ("parameters", "named_parameters"):
            continue
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        if edit is not None and _follows_a_block(source, loop):
            yield source.finding(edit, "trap", "edit_of_model_gradients", ERROR, note)


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


def _follows_a_block(source: Source, node: ast.expr | ast.stmt) -> bool:
    """Whether ``node`` runs after a ``scale_loss`` block of its function, outside of it."""
    block = _block_above(_blocks_by_function(source).get(source.scope(node), []), node)
    return block is not None and block not in source.ancestors(node) and not exclusive(source, block, node)


@once
def _blocks_by_function(source: Source) -> dict[ast.AST, list[With]]:
    """The ``scale_loss`` blocks of each function, in the order of lines."""
    found: dict[ast.AST, list[With]] = {}
    for block in sorted(source.scaled_blocks(), key=lambda block: block.lineno):
        found.setdefault(source.scope(block), []).append(block)
    return found


def _block_above(blocks: list[With], node: ast.expr | ast.stmt) -> With | None:
    """The last of ``blocks`` that begins above ``node``."""
    above = bisect.bisect_left(blocks, node.lineno, key=lambda block: block.lineno)
    return blocks[above - 1] if above else None


def _is_of_model(call: ast.Call) -> bool:
    """Whether a call clips ``model.parameters()``."""
    given = call.args[0] if call.args else None
    return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"


def clip_of_scaled_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping inside the ``scale_loss`` block, where gradients still carry the loss scale.

    The limit is then up to 65536 times too tight. Clip after the block.
    """
    note = "gradients are scaled until the scale_loss block ends; clip after the block"
    for block in source.scaled_blocks():
        for node in source.within(block):
            if isinstance(node, ast.Call) and called(node) in CLIPS and node.args:
                yield source.finding(node, "trap", "clip_of_scaled_gradients", ERROR, note)


def backward_of_wrong_loss(source: Source, repository: Repository) -> Iterator[Finding]:
    """``loss.backward()`` in the block of ``amp.scale_loss(loss, optimizer) as scaled_loss``.

    The block then divides gradients by a scale that they never had. Call backward on what the block yields.
    """
    for block in source.scaled_blocks():
        for item in block.items:
            entry, scaled = item.context_expr, dotted(item.optional_vars)
            given = dotted(entry.args[0]) if isinstance(entry, ast.Call) and entry.args else ""
            if not given or given == scaled:
                continue
            note = f"the block unscales gradients that were never scaled; call {scaled or 'scaled_loss'}.backward()"
            for node in source.within(block):
                if isinstance(node, ast.Call) and dotted(node.func) == f"{given}.backward":
                    yield source.finding(node, "trap", "backward_of_wrong_loss", ERROR, note)
