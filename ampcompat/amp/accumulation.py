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
from ampcompat.amp.aside import give_back, put_aside
from ampcompat.amp.optimizer_state import AmpOptimizerState, Waiting
from ampcompat.amp.scaler import LossScaler


def put_all_aside(optimizer: Any, stash: AmpOptimizerState) -> None:
    """Entry of a ``scale_loss`` block (apex: ``_prepare_amp_backward``): it shall see its own gradients alone."""
    masters, direct = stash.parts(optimizer)
    if stash.stepped:
        # A step consumes master gradients: model.zero_grad() and p.grad = None do not reach them.
        for master in masters:
            master.value.grad = None
        stash.stepped = False
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
                stacklevel=6,
            )
            stash.waiting, stash.gradients_are_local = None, False
        for param in leaves(optimizer, stash):
            param.grad = None
    give_back(stash.delayed_aside)
    give_back(stash.aside)
    stash.delayed_aside, stash.aside, stash.local, stash.in_block = [], [], [], False


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
def rescale(optimizer: Any, stash: AmpOptimizerState, waiting: Waiting, scaler: LossScaler) -> None:
    """Bring what waits to the scale of ``scaler``, in place; exact while half gradients neither over- nor underflow."""
    for param in leaves(optimizer, stash):
        if param.grad is not None:
            grad = param.grad._values() if param.grad.is_sparse else param.grad
            grad.mul_(scaler.scale_on(grad.device) / waiting.scale.to(grad.device, non_blocking=True))
    stash.waiting = Waiting(waiting.scalers, scaler, scaler.scale_on(waiting.scale.device), waiting.blocks)
