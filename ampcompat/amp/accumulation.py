"""The gradients of one optimizer from block to block: unscaled ones put aside, scaled ones that wait.

Gradients wait scaled after a ``delay_unscale`` block, and under DDP's ``no_sync``, where they are still those of this
rank alone and a later backward pass averages what lies in ``param.grad``. The scale may move meanwhile, and the next
block may have another scaler: what waits is unscaled by the scale that it carries or, where it must stay in
``param.grad``, brought to the scale of the next block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat._undo import finish
from ampcompat.amp import misuse
from ampcompat.amp.aside import give_back, put_aside
from ampcompat.amp.gradients import heed_cleared
from ampcompat.amp.optimizer_state import AmpOptimizerState, Waiting
from ampcompat.amp.scaler import LossScaler

_WAITED = "optimizers that waited"


def put_all_aside(optimizer: Any, stash: AmpOptimizerState) -> None:
    """Entry of a ``scale_loss`` block (apex: ``_prepare_amp_backward``): it shall see its own gradients alone."""
    masters, direct = stash.parts(optimizer)
    misuse.heed_moves(stash, masters, direct)
    if stash.stepped:
        # A step consumes master gradients: model.zero_grad() and p.grad = None do not reach them.
        for master in masters:
            master.value.grad = None
        stash.stepped = False
    heed_cleared(masters)
    if not stash.began:  # another optimizer of these weights may have left what it had stepped with
        for master in masters:
            if master.spent:
                master.value.grad = None
        stash.began = True
    if stash.gradients_are_local:
        # DDP averages what lies in ``param.grad`` when its backward pass comes: it stays there.
        stash.local = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in leaves(optimizer, stash)]
    elif stash.waiting is not None:
        put_aside([], [*(m.half for m in masters), *direct], stash.delayed_aside)
    else:
        put_aside(masters, direct, stash.aside)


def go_back(optimizer: Any, stash: AmpOptimizerState) -> None:
    """A block raised: gradients are what they were at its entry, without those that it had half made."""
    if stash.in_block and not _untouched(stash):
        if stash.gradients_are_local:
            warn_once(
                "local gradients lost",
                "A scale_loss block raised in its backward pass while gradients of DDP's no_sync() were waiting - they"
                " lie in the same tensors as the failed ones and are cleared with them - start the accumulation of"
                " this step again.",
            )
            stash.waiting, stash.gradients_are_local = None, False
        for param in leaves(optimizer, stash):
            param.grad = None
    give_back(stash.delayed_aside)
    # Where scaled gradients wait, they lie in ``param.grad``, as at the entry, and the unscaled ones stay beside.
    stays = stash.aside if stash.waiting is not None else []
    if not stays:
        give_back(stash.aside)
    stash.delayed_aside, stash.aside, stash.local, stash.in_block = [], stays, [], False


def _untouched(stash: AmpOptimizerState) -> bool:
    """Whether gradients wait in ``param.grad`` and the block has added none."""
    return stash.gradients_are_local and all(
        p.grad is grad and (grad is None or grad._version == version) for p, grad, version in stash.local
    )


def leaves(optimizer: Any, stash: AmpOptimizerState) -> list[torch.Tensor]:
    """The tensors that a backward pass gives gradients to."""
    masters, direct = stash.parts(optimizer)
    return [*(m.half for m in masters), *direct]


@torch.no_grad()
def rescale(optimizers: Iterable[Any], scaler: LossScaler) -> None:
    """Bring what waits for ``optimizers``, at one scale, to that of ``scaler``, in place; shared tensors once.

    Exact while half gradients neither over- nor underflow.
    """
    grads: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
    after: list[tuple[AmpOptimizerState, Waiting]] = []
    for one in optimizers:
        stash: AmpOptimizerState = one._amp_stash
        waiting = stash.waiting
        if waiting is None:
            continue
        for param in leaves(one, stash):
            if param.grad is not None:
                grad = param.grad._values() if param.grad.is_sparse else param.grad
                factor = scaler.scale_on(grad.device) / waiting.scale.to(grad.device, non_blocking=True)
                grads[id(param)] = grad, factor, grad._version
        scale = scaler.scale_on(waiting.scale.device)
        after.append((stash, Waiting(waiting.scalers, scaler, scale, waiting.blocks)))

    def make() -> None:
        for grad, factor, version in grads.values():
            if grad._version == version:
                grad.mul_(factor)
        for stash, waiting in after:
            stash.waiting = waiting

    finish(make)


def note_waiting(optimizers: Iterable[Any]) -> None:
    """Gradients of ``optimizers`` are about to wait: let :func:`waiting_beside` know."""
    _that_waited().update(optimizers)


def waiting_beside(optimizers: Iterable[Any], of_one_block: bool = False) -> list[Any]:
    """Other optimizers that hold a tensor in which gradients wait for one of ``optimizers``, or will after it.

    What waits lies in the tensors, whoever holds these: it is unscaled, once, for all of them.

    Args:
        optimizers: Optimizers under amp.
        of_one_block: Those as well that wait since the same block: they are one backward pass.
    """
    if not state.rooms.get(_WAITED):
        return []
    found = list(optimizers)
    others = [one for one in _that_waited() if _is_waiting(one) and not any(one is other for other in found)]
    beside: list[Any] = []
    held = _tensors_of(found) if others else set()
    while others:
        blocks = {
            block for one in found if one._amp_stash.waiting is not None for block in one._amp_stash.waiting.blocks
        }
        near = [
            one
            for one in others
            if not held.isdisjoint(_tensors_of([one])) or (of_one_block and blocks & one._amp_stash.waiting.blocks)
        ]
        if not near:
            break
        beside, found, held = beside + near, found + near, held | _tensors_of(near)
        others = [one for one in others if not any(one is other for other in near)]
    return beside


def _tensors_of(optimizers: Iterable[Any]) -> set[int]:
    return {id(tensor) for one in optimizers for tensor in leaves(one, one._amp_stash)}


def _that_waited() -> weakref.WeakSet[Any]:
    """Optimizers for which gradients have waited at some time."""
    found: weakref.WeakSet[Any] = state.room(_WAITED, weakref.WeakSet)
    return found


def _is_waiting(optimizer: Any) -> bool:
    stash: AmpOptimizerState | None = vars(optimizer).get("_amp_stash")  # it may have been taken out of amp
    return stash is not None and stash.waiting is not None
