"""``optimizer._prepare_amp_backward`` and ``_post_amp_backward``, which scripts call or replace.

apex called them at the beginning and the end of a block (``apex/amp/handle.py: scale_loss``), and they saved and
unscaled the gradients of the optimizer. Where a script has put its own in their place, blocks call these.
"""

from __future__ import annotations

from collections.abc import Callable

from ampcompat import _torch
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.open_blocks import OpenBlock, ScriptsPart, open_block_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, Leaves, OptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import add_saved, save_grads, unscale_new


def prepare_amp_backward(optimizer: AmpOptimizer) -> None:
    """Save unscaled gradients (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``).

    Outside of blocks, ``_post_amp_backward`` adds them to what the next backward pass gives.
    """
    stash: OptimizerState = optimizer._amp_stash
    follow_changes(optimizer)
    block = open_block_of(stash.leaves)
    if block is not None:
        save_grads(stash.leaves, block.saved)
    else:
        save_grads(stash.leaves, stash.saved_by_script)


@_torch.without_grad
def post_amp_backward(optimizer: AmpOptimizer, scaler: LossScaler) -> None:
    """Unscale new gradients (``apex/amp/_process_optimizer.py: post_backward_with_master_weights``).

    The scale does not move, and no step is skipped: the caller sees to that, by the scaler's ``update_scale()``; or, if
    a script's override called this, the enclosing block does.
    """
    stash: OptimizerState = optimizer._amp_stash
    block = open_block_of(stash.leaves)
    if block is not None:
        leaves = stash.leaves if block.scripts_part is None else block.scripts_part.leaves
        unscale_new(leaves, scaler, block.scale)
        return
    unscale_new(stash.leaves, scaler, scaler.current_scale())
    add_saved(stash.saved_by_script)
    if observer_state.observers:
        notify("on_unscaled_by_script", optimizer)


# -- in a block --------------------------------------------------------------------------------------------------------
def are_replaced(optimizers: list[AmpOptimizer]) -> bool:
    """Whether a script has put a method of its own on one of ``optimizers``."""
    for optimizer in optimizers:
        if _override(optimizer, "_prepare_amp_backward", prepare_amp_backward) is not None:
            return True
        if _override(optimizer, "_post_amp_backward", post_amp_backward) is not None:
            return True
    return False


def save_by_scripts(block: OpenBlock) -> None:
    """Save the gradients of ``block``: by the ``_prepare_amp_backward`` of scripts, where apex called it."""
    for optimizer in block.optimizers:
        prepare = _override(optimizer, "_prepare_amp_backward", prepare_amp_backward)
        if prepare is None:
            save_grads(optimizer._amp_stash.leaves, block.saved)
        else:
            prepare()


def unscale_by_scripts(block: OpenBlock) -> tuple[bool, Leaves]:
    """Unscale gradients of ``block`` by the ``_post_amp_backward`` of scripts.

    Returns:
        Whether there were new gradients for them, and the leaves of ``block`` that are left to unscale.
    """
    overrides: dict[AmpOptimizer, Callable[..., None]] = {}
    for optimizer in block.optimizers:
        post = _override(optimizer, "_post_amp_backward", post_amp_backward)
        if post is not None:
            overrides[optimizer] = post
    if not overrides:
        return False, block.leaves
    block.scaler.forget_last_pass()
    left = block.leaves.ids()
    has_new_grads = False
    for optimizer, post in overrides.items():
        leaves = optimizer._amp_stash.leaves.part(left)
        left -= leaves.ids()
        has_new_grads |= any(leaf.grad is not None for leaf in leaves.tensors())
        _call_post(post, block, ScriptsPart(leaves))
    return has_new_grads, block.leaves.part(left)


def _call_post(post: Callable[..., None], block: OpenBlock, part: ScriptsPart) -> None:
    """Call a script's ``post`` for ``part``, and do there what the script leaves to amp."""
    block.scripts_part = part
    try:
        post(block.scaler)
    finally:
        block.scripts_part = None
    ids = part.leaves.ids()
    saved = {param: grad for param, grad in block.saved.items() if id(param) in ids}
    for param in saved:
        del block.saved[param]
    if not part.saved_grads_taken:
        add_saved(saved)
    for master in part.leaves.masters:
        master.grad_shown = master.half.grad is not None and master.value.grad is not None


def _override(optimizer: AmpOptimizer, name: str, own: Callable[..., None]) -> Callable[..., None] | None:
    """The method ``name`` that a script has put on ``optimizer``; None where it is amp's ``own``."""
    method: Callable[..., None] | None = vars(optimizer).get(name)
    return None if getattr(method, "__func__", None) is own else method
