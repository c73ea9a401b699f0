"""``optimizer._prepare_amp_backward`` and ``_post_amp_backward``, which scripts call or replace.

apex called them at the beginning and the end of a block (``apex/amp/handle.py: scale_loss``), and they saved and
unscaled the gradients of the optimizer. Where a script has put its own in their place, blocks call these.
"""

from __future__ import annotations

from collections.abc import Callable

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.gradients import Block, Pending, open_block_of, pending_in
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import add_saved, save_grads, unscale_new


def prepare_amp_backward(optimizer: Optimizer) -> None:
    """Save unscaled gradients (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``).

    Outside of blocks, what the next backward pass gives is pending until ``_post_amp_backward``.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    block = open_block_of(stash.leaves)
    if block is not None:
        save_grads(stash.leaves, block.saved)
    elif not pending_in(stash.leaves):
        scaler = stash.session.scalers[0]
        pending = Pending(stash.leaves, [scaler], scaler.scale_on())
        save_grads(stash.leaves, pending.saved)
        state.pending.append(pending)


@_torch.without_grad
def post_amp_backward(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Unscale new gradients (``apex/amp/_process_optimizer.py: post_backward_with_master_weights``).

    The scale does not move, and no step is skipped: the caller sees to that, by the scaler's ``update_scale()``; or, if
    a script's override called this, the enclosing block does.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    block = open_block_of(stash.leaves)
    if block is not None:
        unscale_new(stash.leaves if stash.part is None else stash.part, scaler, block.scale)
        return
    waiting = pending_in(stash.leaves)
    if not waiting:
        unscale_new(stash.leaves, scaler, scaler.scale_on())
    for pending in waiting:
        state.pending.remove(pending)
        unscale_new(pending.leaves, scaler, pending.scale)
        add_saved(pending.saved)


# -- in a block --------------------------------------------------------------------------------------------------------
def save_or_prepare(optimizer: Optimizer, block: Block, scaled: set[int], delay: bool) -> None:
    """Save the gradients of ``optimizer``, or call a script's own method where apex called it.

    Args:
        optimizer: One of the optimizers of ``block``.
        block: It keeps what is saved.
        scaled: Ids of leaves with scaled gradients, which stay.
        delay: Whether the end of the block leaves its gradients scaled.
    """
    leaves: Leaves = optimizer._amp_stash.leaves
    prepare = _override(optimizer, "_prepare_amp_backward", prepare_amp_backward)
    if prepare is None or delay or scaled:
        save_grads(leaves, block.saved, scaled)
    else:
        prepare()


def unscale_by_scripts(block: Block) -> tuple[bool, Leaves]:
    """Call the ``_post_amp_backward`` of scripts.

    Returns:
        Whether there were new gradients for them, and the leaves of ``block`` that are left to unscale.
    """
    overrides: dict[Optimizer, Callable[..., None]] = {}
    for optimizer in block.optimizers:
        post = _override(optimizer, "_post_amp_backward", post_amp_backward)
        if post is not None:
            overrides[optimizer] = post
    if not overrides:
        return False, block.leaves
    scaler = block.scalers[0]
    scaler.forget_last_pass()
    left = block.leaves.ids()
    has_new_grads = False
    for optimizer, post in overrides.items():
        stash: AmpOptimizerState = optimizer._amp_stash
        part = stash.leaves.part(left)
        left -= part.ids()
        has_new_grads |= any(leaf.grad is not None for leaf in part.tensors())
        _call_post(post, scaler, stash, part, block)
    return has_new_grads, block.leaves.part(left)


def _call_post(
    post: Callable[..., None], scaler: LossScaler, stash: AmpOptimizerState, part: Leaves, block: Block
) -> None:
    """Call a script's ``post``, and do for ``part`` what the script leaves to amp."""
    stash.saved_grads_taken = False
    stash.part = part
    try:
        post(scaler)
    finally:
        stash.part = None
    ids = part.ids()
    saved = {param: grad for param, grad in block.saved.items() if id(param) in ids}
    for param in saved:
        del block.saved[param]
    if not stash.saved_grads_taken:
        add_saved(saved)
    for master in part.masters:
        master.grad_shown = master.half.grad is not None and master.value.grad is not None


def _override(optimizer: Optimizer, name: str, own: Callable[..., None]) -> Callable[..., None] | None:
    """The method ``name`` that a script has put on ``optimizer``; None where it is amp's ``own``."""
    method: Callable[..., None] | None = vars(optimizer).get(name)
    return None if getattr(method, "__func__", None) is own else method
