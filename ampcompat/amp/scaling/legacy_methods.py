"""``optimizer._prepare_amp_backward`` and ``_post_amp_backward``, which scripts call or replace.

apex called them at the beginning and the end of a block (``apex/amp/handle.py: scale_loss``), and had them save and
unscale the gradients of the optimizer. A script's own are called where apex called them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ampcompat import _torch
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.gradient_sets import GradientSet
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import save_grads, unscale_new


def prepare_amp_backward(optimizer: Optimizer) -> None:
    """Save unscaled gradients (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    optimizer._amp_stash.look_up(optimizer)
    _save_grads_of(optimizer._amp_stash)


def _save_grads_of(stash: AmpOptimizerState) -> None:
    for gradient_set in stash.sets:
        if gradient_set.pending is None:
            save_grads(gradient_set)


@_torch.without_grad
def post_amp_backward(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Unscale new gradients (``apex/amp/_process_optimizer.py: post_backward_with_master_weights``).

    The scale does not move, and no step is skipped: the caller sees to that, by the scaler's ``update_scale()``; or the
    block does whose end calls the method that a script has put in the place of this one.
    """
    for gradient_set in optimizer._amp_stash.sets:
        if gradient_set.block is not None:
            scale = gradient_set.block.scale
        elif gradient_set.pending is not None:
            scale = gradient_set.pending.scale
        else:
            scale = scaler.scale_on()
        has_new_grads = unscale_new(gradient_set, scaler, scale)
        gradient_set.end_block()
        gradient_set.note_new(has_new_grads)
        gradient_set.note_user(optimizer)


# -- in a block --------------------------------------------------------------------------------------------------------
def save_or_prepare(optimizer: Optimizer, delay: bool) -> None:
    """Save the gradients of ``optimizer``, or have a script's own method do it where apex called it."""
    prepare = _override(optimizer, "_prepare_amp_backward", prepare_amp_backward)
    if prepare is None or delay or optimizer._amp_stash.params_have_scaled_gradients:
        _save_grads_of(optimizer._amp_stash)
    else:
        prepare()


def unscale_by_scripts(optimizers: Iterable[Optimizer], scaler: LossScaler) -> dict[GradientSet, bool]:
    """Call the ``_post_amp_backward`` of scripts; return the sets these unscale, and whether each has new gradients."""
    new: dict[GradientSet, bool] = {}
    for optimizer in optimizers:
        post = _override(optimizer, "_post_amp_backward", post_amp_backward)
        if post is None:
            continue
        if not new:
            scaler.forget_last_pass()
        stash: AmpOptimizerState = optimizer._amp_stash
        sets = [each for each in stash.sets if each not in new]
        for gradient_set in sets:
            new[gradient_set] = any(leaf.grad is not None for leaf in gradient_set.leaves())
        stash.saved_grads_taken = False
        with stash.limited_to(sets):  # where it calls ours, that unscales no set twice
            post(scaler)
        for gradient_set in sets:
            if not stash.saved_grads_taken:
                gradient_set.add_saved()
            for master in gradient_set.masters:
                grad = master.half.grad
                if grad is not None and master.value.grad is not None:
                    master.note_added(grad)
    return new


def _override(optimizer: Optimizer, name: str, own: Callable[..., None]) -> Callable[..., None] | None:
    """What a script has put in the place of ``optimizer``'s method ``name``; None where that is our ``own``."""
    method: Callable[..., None] | None = vars(optimizer).get(name)
    return None if getattr(method, "__func__", None) is own else method
