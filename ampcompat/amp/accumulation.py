"""The gradients of one optimizer from block to block: unscaled ones put aside, scaled ones that wait.

Gradients wait scaled after a ``delay_unscale`` block, and under DDP's ``no_sync``, where they are still those of this
rank alone and a later backward pass averages what lies in ``param.grad``. The scale may move meanwhile, and the next
block may have another scaler: what waits is unscaled by the scale that it carries or, where it must stay in
``param.grad``, brought to the scale of the next block.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompat._log import warn_once
from ampcompat.amp import misuse
from ampcompat.amp.gradients import give_back, put_aside, take_new
from ampcompat.amp.master_index import follow_replacements
from ampcompat.amp.optimizer_state import AmpOptimizerState, Waiting
from ampcompat.amp.scaler import LossScaler


def begin_block(optimizer: Any, scaler: LossScaler | None = None, done: set[int] | None = None) -> None:
    """Entry of a ``scale_loss`` block (apex: ``_prepare_amp_backward``).

    Args:
        optimizer: An optimizer under amp.
        scaler: The block's scaler.
        done: As in :func:`end_block`, for gradients that are unscaled before the block.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.waiting is not None and scaler is not None and not stash.waiting.fits(scaler):
        if stash.gradients_are_local:
            _rescale(optimizer, stash, stash.waiting, scaler)
        else:
            finish_delayed(optimizer, stash, scaler, done)
    masters, direct = stash.parts(optimizer)
    if stash.stepped:
        # A step consumes master gradients: model.zero_grad() and p.grad = None do not reach them.
        for master in masters:
            master.value.grad = None
        stash.stepped = False
    if stash.gradients_are_local:
        # DDP averages what lies in ``param.grad`` when its backward pass comes: it stays there.
        stash.local = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in _leaves(optimizer, stash)]
    elif stash.waiting is not None:
        stash.delayed_aside = put_aside([], [*(m.half for m in masters), *direct])
    else:
        stash.aside = put_aside(masters, direct)


def end_block(
    optimizer: Any, scaler: LossScaler, done: set[int] | None = None, scale: torch.Tensor | None = None
) -> bool:
    """Exit of a ``scale_loss`` block that unscales (apex: ``_post_amp_backward``).

    Args:
        optimizer: An optimizer under amp.
        scaler: The block's scaler.
        done: ids of the tensors that another optimizer of the block has seen to; those of this one are added.
        scale: What the gradients were scaled by; None for the scaler's current scale.

    Returns:
        Whether the block gave ``optimizer`` any gradient that is not in ``done``.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    _rejoin(stash)
    masters, direct = stash.parts(optimizer)
    follow_replacements(masters)
    if done is not None:
        masters = [m for m in masters if id(m.value) not in done]
        direct = [p for p in direct if id(p) not in done]
        done.update(id(m.value) for m in masters)
        done.update(id(p) for p in direct)
    seen = take_new(scaler, masters, direct, stash.aside, scale)
    stash.aside = []
    stash.waiting, stash.gradients_are_local, stash.local = None, False, []
    stash.blocks += 1
    stash.seen = misuse.watch(masters)
    return seen


def delay(optimizer: Any, scaler: LossScaler, scale: torch.Tensor, local: bool) -> None:
    """Exit of a block that leaves its gradients scaled, by ``scale``."""
    stash: AmpOptimizerState = optimizer._amp_stash
    _rejoin(stash)
    stash.gradients_are_local |= local
    earlier = stash.waiting.scalers if stash.waiting is not None else {}
    stash.waiting = Waiting({**earlier, scaler: None}, scaler, scale)
    stash.in_block, stash.local = False, []


def finish_delayed(
    optimizer: Any, stash: AmpOptimizerState, next_scaler: LossScaler | None = None, done: set[int] | None = None
) -> None:
    """Unscale what waits: it is about to be used, or a block with another scale follows.

    Args:
        optimizer: An optimizer under amp.
        stash: Its state.
        next_scaler: The scaler of the block that follows. Where it is the same, the two are one backward pass of it.
        done: As in :func:`end_block`.
    """
    waiting = stash.waiting
    if waiting is None:
        return
    stash.blocks_with_gradients += end_block(optimizer, waiting.scaler, done, waiting.scale)
    same_pass = next_scaler is waiting.scaler
    found = waiting.scaler.put_off_update() if same_pass else waiting.scaler.end_backward_pass()
    if found is not None:
        stash.overflows.append((waiting.scaler, found))
        count_in_others([stash], found, {other: None for other in waiting.scalers if other is not waiting.scaler})


def count_in_others(stashes: list[AmpOptimizerState], found: torch.Tensor, others: dict[LossScaler, None]) -> None:
    """Let scalers whose losses lie in the same gradients count a pass as well: which overflowed is no longer known.

    Args:
        stashes: Optimizers that the gradients belong to.
        found: The pass's overflow flag.
        others: The scalers (a dict, for its order).
    """
    for scaler in others:
        scaler.note(found)
        noted = scaler.end_backward_pass()
        if noted is not None:
            for stash in stashes:
                stash.overflows.append((scaler, noted))


def leave_failed(optimizers: Any) -> None:
    """A block raised: gradients are what they were at its entry, without those that it had half made."""
    for one in optimizers:
        stash: AmpOptimizerState = one._amp_stash
        stash.in_block = False
        local, stash.local = stash.local, []
        if stash.gradients_are_local:
            if all(p.grad is grad and (grad is None or grad._version == version) for p, grad, version in local):
                continue  # it failed before its backward pass
            warn_once(
                "local gradients lost",
                "A scale_loss block raised in its backward pass while gradients of DDP's no_sync() were waiting - they"
                " lie in the same tensors as the failed ones and are cleared with them - start the accumulation of"
                " this step again.",
                stacklevel=5,
            )
            stash.waiting, stash.gradients_are_local = None, False
        for param in _leaves(one, stash):
            param.grad = None
        if stash.waiting is not None:
            _rejoin(stash)
        else:
            give_back(stash.aside)
            stash.aside = []


def _rejoin(stash: AmpOptimizerState) -> None:
    """Add the gradients of a block to the scaled ones that earlier blocks left."""
    give_back(stash.delayed_aside, add=True)
    stash.delayed_aside = []


def _leaves(optimizer: Any, stash: AmpOptimizerState) -> list[torch.Tensor]:
    """The tensors that a backward pass gives gradients to."""
    masters, direct = stash.parts(optimizer)
    return [*(m.half for m in masters), *direct]


def _rescale(optimizer: Any, stash: AmpOptimizerState, waiting: Waiting, scaler: LossScaler) -> None:
    """Bring what waits to the scale of ``scaler``, in place; exact while half gradients neither over- nor underflow."""
    with torch.no_grad():
        for param in _leaves(optimizer, stash):
            if param.grad is not None:
                grad = param.grad._values() if param.grad.is_sparse else param.grad
                grad.mul_(scaler.scale_on(grad.device) / waiting.scale.to(grad.device, non_blocking=True))
    stash.waiting = Waiting(waiting.scalers, scaler, scaler.scale_on(waiting.scale.device))
