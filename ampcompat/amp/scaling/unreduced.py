"""Gradients of this process alone: what a block in ``no_sync`` has left, until all processes have averaged them.

DDP averages ``p.grad`` as a backward pass leaves it: older gradients, if they are there before that pass, are averaged
with the new ones. So the next block puts them back (:func:`bring_back`), multiplied by its own scale, and unscales the
average of the sums at its end. An overflow that one process has found is inf or NaN in the average of all: each of them
finds it then, and none before, so that their scales stay equal.

A script that averages by itself (apex's ``disable_allreduce``) has done so when it steps: the step looks
(:func:`count_averaged`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.open_blocks import OpenBlock, leaves_of
from ampcompat.amp.scaling.optimizer_state import Leaves, OptimizerState, Overflow, Unreduced, optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import any_non_finite, entries_of


def waits_for_reduction(leaves: Leaves) -> bool:
    """Whether gradients of ``leaves`` have yet to be averaged, by a wrapper of the model or by the script."""
    tensors = leaves.tensors()
    return averages_by_script(leaves) or any(adapter.defers_reduction(tensors) for adapter in adapter_state.adapters)


def averages_by_script(leaves: Leaves) -> bool:
    """Whether the script averages the gradients of ``leaves`` by itself."""
    tensors = leaves.tensors()
    return any(adapter.leaves_reduction_to_script(tensors) for adapter in adapter_state.adapters)


def note_unreduced(block: OpenBlock) -> None:
    """Note that the gradients of ``block``, which has ended, are those of this process alone."""
    block.scaler.forget_found_inf()  # other processes do not know
    for stash in block.stashes:
        earlier = [] if stash.unreduced is None else stash.unreduced.scalers
        scalers = list(dict.fromkeys([*earlier, block.scaler]))
        stash.unreduced = Unreduced(scalers, block.scale)


# -- the next block ----------------------------------------------------------------------------------------------------
@_torch.without_grad
def bring_back(block: OpenBlock) -> None:
    """Put the unreduced gradients of leaves of ``block`` where a backward pass adds to them, at its scale."""
    holders = [optimizer for optimizer in optimizer_index.listed() if optimizer._amp_stash.unreduced is not None]
    if not holders:
        return
    block.brought = leaves_of(holders).part(block.leaves.ids())
    for master in block.brought.masters:
        if master.value.grad is not None:
            master.half.grad = _scaled(master.value.grad, block.scale).to(master.dtype)
    for param in block.brought.masterless:
        if param in block.saved:
            param.grad = _scaled(block.saved[param], block.scale)
    for holder in holders:
        _rescale_kept(holder._amp_stash, block.brought, block.scale)


def _scaled(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A copy of ``grad``, multiplied by ``scale``."""
    copy = grad.detach().clone()
    if scale is not None:
        entries_of(_torch.local_part(copy)).mul_(_torch.moved_to(grad.device, scale))
    return copy


def _rescale_kept(stash: OptimizerState, brought: Leaves, scale: torch.Tensor | None) -> None:
    """Bring gradients that a wrapper keeps to itself, still scaled, from the scale of their block to ``scale``.

    Where the ratio is a power of two, as it is unless a script wrote one of the two, this loses no bit of a gradient
    that stays within the normal range of its dtype.
    """
    before = stash.unreduced
    if before is None or (before.scale is None and scale is None):
        return
    for grad in kept_by_wrappers(stash.leaves.part(brought.ids())):
        ratio = torch.ones((), dtype=torch.float32, device=grad.device)
        if scale is not None:
            ratio = _torch.moved_to(grad.device, scale)
        if before.scale is not None:
            ratio = ratio / _torch.moved_to(grad.device, before.scale)
        grad.mul_(ratio)
    stash.unreduced = before._replace(scale=scale)


def drop_brought(block: OpenBlock) -> None:
    """Drop the older gradients that ``block`` has brought back: they are in the new ones, which it is to unscale."""
    if block.brought is None:
        return
    for master in block.brought.masters:
        master.value.grad = None
    ids = block.brought.ids()
    block.saved = {param: grad for param, grad in block.saved.items() if id(param) not in ids}


def kept_by_wrappers(leaves: Leaves) -> list[torch.Tensor]:
    """The scaled gradients of ``leaves`` that wrappers of models keep for a later backward pass."""
    tensors = leaves.tensors()
    return [grad for adapter in adapter_state.adapters for grad in adapter.unreduced_gradients(tensors)]


def count_reduced(block: OpenBlock, found_inf: torch.Tensor | None) -> list[Overflow]:
    """Count the passes whose gradients have waited, and which ``block``, now ended, has had averaged: scales move.

    Whose loss an overflow stems from, no process knows: each scaler whose gradients have waited counts it.

    Args:
        block: It has ended.
        found_inf: Whether its gradients have overflowed.

    Returns:
        What the optimizers of the block are to note.
    """
    scalers: dict[LossScaler, None] = {}
    for stash in block.stashes:
        if stash.unreduced is not None:
            scalers.update(dict.fromkeys(stash.unreduced.scalers))
            stash.unreduced = None
    scalers.pop(block.scaler, None)
    return _count(scalers, found_inf)


def _count(scalers: Iterable[LossScaler], found_inf: torch.Tensor | None) -> list[Overflow]:
    """Have each of ``scalers`` move its scale for a pass with this flag; return what optimizers are to note."""
    overflows = []
    for scaler in scalers:
        flag = scaler.adjust(found_inf)
        if flag is not None:
            overflows.append(Overflow(scaler, flag, None))
    return overflows


# -- the step ----------------------------------------------------------------------------------------------------------
def count_averaged(stash: OptimizerState) -> None:
    """Count the passes whose gradients the script has averaged: look for inf and NaN, move scales, and note the flags.

    No block has told: each has ended before the average. No host sync.
    """
    unreduced = stash.unreduced
    gradients = stash.leaves.gradients()
    if unreduced is None or not gradients:  # a wrapper may keep them all
        return
    stash.unreduced = None
    is_checked = any(scaler.is_dynamic for scaler in unreduced.scalers)
    found_inf = any_non_finite(gradients) if is_checked else None
    for overflow in _count(unreduced.scalers, found_inf):
        stash.note_overflow(overflow)
