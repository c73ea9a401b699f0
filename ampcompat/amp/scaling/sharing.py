"""Optimizers that hold tensors in common, and what two of them must not do to the same tensor at the same time.

A tensor that several optimizers hold (an encoder under two heads) has one gradient, and at levels with masters one
master. What one optimizer's blocks and steps do to them concerns the others: an overflow skips every step that would
use the gradient, and a gradient that one step has used up stays for the others until they have stepped as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.stash import Gradients

Sharing = weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Optimizer]]]


def sharers(optimizer: Optimizer) -> list[Optimizer]:
    """The other optimizers under amp that hold a tensor which ``optimizer`` holds."""
    index = state.optimizers
    if len(index.live) < 2:
        return []
    if index.sharing is None:
        index.sharing = _find_sharing()
    others = [reference() for reference in index.sharing.get(optimizer, ())]
    return [other for other in others if other is not None]


def sharers_outside(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that share a tensor with one of ``optimizers`` and are none of them; each once."""
    if len(state.optimizers.live) <= len(optimizers):
        return []
    inside = set(map(id, optimizers))
    outside: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for other in sharers(optimizer):
            if id(other) not in inside:
                outside[id(other)] = other
    return list(outside.values())


def _find_sharing() -> Sharing:
    """Find, for all optimizers under amp, those that hold a tensor of theirs."""
    holders: dict[int, list[Optimizer]] = {}
    for optimizer in state.optimizers.listed():
        for leaf in optimizer._amp_stash.leaves():
            holders.setdefault(id(leaf), []).append(optimizer)
    # Most tensors have the same holders as others: look at each set of holders once.
    sets_of_holders = {tuple(map(id, group)): group for group in holders.values() if len(group) > 1}
    others_of: dict[int, dict[int, Optimizer]] = {}
    for group in sets_of_holders.values():
        for optimizer in group:
            others = others_of.setdefault(id(optimizer), {})
            others.update((id(other), other) for other in group if other is not optimizer)
    sharing: Sharing = weakref.WeakKeyDictionary()
    for optimizer in state.optimizers.listed():
        others = others_of.get(id(optimizer), {})
        sharing[optimizer] = [weakref.ref(other) for other in others.values()]
    return sharing


def never_held(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``params`` that no optimizer under amp holds or has held."""
    held = state.optimizers.held
    return [param for param in params if held.get(id(param)) is not param]


def waited_for(optimizer: Optimizer) -> set[Master]:
    """The masters of other optimizers that have unscaled gradients and have yet to step with them."""
    others = sharers(optimizer)
    if not others:
        return set()
    waited: set[Master] = set()
    for other in others:
        if other._amp_stash.gradients is Gradients.UNSCALED:
            waited.update(other._amp_stash.masters)
    return waited


# -- what is refused ---------------------------------------------------------------------------------------------------
def refuse_pending(optimizers: Sequence[Optimizer], delay: bool = False) -> None:
    """Refuse scaled gradients pending in a tensor that two optimizers hold, one of ``optimizers`` or both.

    ``delay``: those of ``optimizers`` are about to be pending.
    """
    inside = set(map(id, optimizers))
    others = [other for other in state.optimizers.pending if id(other) not in inside]
    holders: dict[int, Optimizer] = {}
    for optimizer in (*others, *optimizers):
        for leaf in optimizer._amp_stash.leaves():
            first = holders.setdefault(id(leaf), optimizer)
            if first is not optimizer and (delay or _is_pending(first) or _is_pending(optimizer)):
                raise RuntimeError(
                    f"scaled gradients are pending (delay_unscale, or DDP's no_sync) in a parameter that"
                    f" {type(first).__name__} and {type(optimizer).__name__} share - one of them would step with"
                    " gradients still multiplied by the loss scale - leave out delay_unscale (gradients accumulate"
                    " without it), or give each optimizer its own parameters (D30)."
                )


def _is_pending(optimizer: Optimizer) -> bool:
    return optimizer._amp_stash.pending is not None


def refuse_open_blocks(optimizers: Sequence[Optimizer]) -> None:
    """Refuse a block of ``optimizers`` while one of another optimizer is open that holds a tensor of theirs."""
    for other in sharers_outside(optimizers):
        if other._amp_stash.in_block:
            raise RuntimeError(
                f"scale_loss inside the scale_loss block of another optimizer ({type(other).__name__}) that shares"
                " parameters with this one - the gradients of the two losses would be added up in the same tensors, and"
                " unscaled twice - close the first block before, or give both optimizers to one block:"
                " `with amp.scale_loss(loss_a + loss_b, [optimizer_a, optimizer_b])` (D38)."
            )


def refuse_step_in_block(optimizer: Optimizer) -> None:
    """Refuse a step of ``optimizer`` while a block of another optimizer is open that holds a tensor of its own."""
    for other in sharers(optimizer):
        if other._amp_stash.in_block:
            raise RuntimeError(
                f"optimizer.step() inside the scale_loss block of another optimizer ({type(other).__name__}) that"
                " shares parameters with this one - their gradients are still multiplied by the loss scale there, or"
                " put aside - leave the block first, then step (D38)."
            )
