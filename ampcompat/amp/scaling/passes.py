"""One backward pass of a ``scale_loss`` block: its beginning and end, in all gradient sets of the block's optimizers.

``gradient_sets`` has the table of what each does. apex did the same in ``apex/amp/handle.py: scale_loss`` and
``apex/amp/_process_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import drop_cleared_gradients
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.gradient_sets import GradientSet, Overflow, Pending, all_sets, sets_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import (
    look_at_half_gradients,
    mirror_to_half,
    rescale_pending,
    save_grads,
    unscale_new,
)


# -- its beginning -----------------------------------------------------------------------------------------------------
def begin(optimizers: Sequence[Optimizer], block: Any, scaler: LossScaler, delay: bool) -> None:
    """Save older gradients for a backward pass; ``delay``: its end leaves its gradients scaled."""
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        if stash.undecided_steps:
            stash.report_arrived()
    sets = sets_of(optimizers)
    for gradient_set in all_sets() if len(state.optimizers.live) > 1 else sets:
        look_at_half_gradients(gradient_set)  # of other sets too, before the backward pass may add to them
    for gradient_set in sets:
        gradient_set.reset_if_cleared()
        begin_anew(gradient_set, optimizers)
        if gradient_set.pending is not None:
            rescale_pending(gradient_set, gradient_set.pending, scaler)
    for optimizer in optimizers:
        _save_or_prepare(optimizer, delay)
        for gradient_set in optimizer._amp_stash.sets:
            gradient_set.block = block  # from here on, an exception puts back what was saved


def begin_anew(gradient_set: GradientSet, by: Sequence[Optimizer]) -> None:
    """Drop what an optimizer among ``by`` has stepped with; warn where another has yet to."""
    if gradient_set.begin_anew(by):
        misuse.warn_of("shared gradients dropped")


def _save_or_prepare(optimizer: Optimizer, delay: bool) -> None:
    """Save the gradients of ``optimizer``, or have a script's own method do it where apex called it."""
    prepare = replaced(optimizer, "_prepare_amp_backward", prepare_amp_backward)
    if prepare is None or delay or optimizer._amp_stash.params_have_scaled_gradients:
        _save_grads_of(optimizer._amp_stash)
    else:
        prepare()


def prepare_amp_backward(optimizer: Optimizer) -> None:
    """Save unscaled gradients (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    optimizer._amp_stash.look_up(optimizer)
    _save_grads_of(optimizer._amp_stash)


def _save_grads_of(stash: AmpOptimizerState) -> None:
    for gradient_set in stash.sets:
        if gradient_set.pending is None:
            save_grads(gradient_set)


# -- its end -----------------------------------------------------------------------------------------------------------
@_torch.without_grad
def end(
    sets: Sequence[GradientSet],
    optimizers: Iterable[Optimizer],
    scaler: LossScaler,
    scale: torch.Tensor | None,
    moves_scale: bool = True,
) -> bool:
    """Unscale new gradients, add them to accumulated ones, and make the scaler's transition. No host sync.

    Args:
        sets: Those that the pass has given gradients to.
        optimizers: Those of the block: whose methods scripts may have replaced.
        scaler: That of the block.
        scale: What the loss was multiplied by; None where nothing was scaled.
        moves_scale: Move the scale now; else the next transition counts the overflow.

    Returns:
        Whether there were new gradients.
    """
    pending_scalers: dict[LossScaler, None] = {}  # of earlier blocks whose losses have a part in these gradients
    for gradient_set in sets:
        if gradient_set.pending is not None:
            pending_scalers.update(gradient_set.pending.scalers)
    new = _unscale_by_scripts(optimizers, scaler)
    for gradient_set in sets:
        if gradient_set not in new:
            new[gradient_set] = unscale_new(gradient_set, scaler, scale)
    overflows = _make_transitions(scaler, scale, pending_scalers, moves_scale)
    has_new_grads = True in new.values()
    for gradient_set in sets:
        gradient_set.close()
        gradient_set.note_new(new[gradient_set], has_new_grads)
        if overflows:
            gradient_set.note_overflows(overflows)
    return has_new_grads


def _unscale_by_scripts(optimizers: Iterable[Optimizer], scaler: LossScaler) -> dict[GradientSet, bool]:
    """Call the ``_post_amp_backward`` of scripts; return the sets these unscale, and whether each has new gradients."""
    new: dict[GradientSet, bool] = {}
    for optimizer in optimizers:
        post = replaced(optimizer, "_post_amp_backward", post_amp_backward)
        if post is None:
            continue
        if not new:
            scaler.forget_last_pass()
        stash: AmpOptimizerState = optimizer._amp_stash
        sets = [each for each in stash.sets if each not in new]
        for gradient_set in sets:
            new[gradient_set] = any(leaf.grad is not None for leaf in gradient_set.leaves())
        stash.saved_grads_taken = False
        with stash.showing(sets):  # where it calls ours, that unscales no set twice
            post(scaler)
        for gradient_set in sets:
            if not stash.saved_grads_taken:
                gradient_set.add_saved()
            for master in gradient_set.masters:
                grad = master.half.grad
                if grad is not None and master.value.grad is not None:
                    master.added_grad = (grad, grad._version)
    return new


def _make_transitions(
    scaler: LossScaler, scale: torch.Tensor | None, pending_scalers: dict[LossScaler, None], moves_scale: bool
) -> list[Overflow]:
    """Have every scaler of a backward pass count it; return the flags that steps must look at."""
    if scale is None:  # a static scale of one
        if moves_scale:
            scaler._unskipped += 1
        return []
    found_inf = scaler.take_found_inf()
    overflows: list[Overflow] = []
    flag = scaler.adjust(found_inf) if moves_scale else scaler.delay(found_inf)
    if flag is not None:
        overflows.append((scaler, flag))
    for other in pending_scalers:  # the loss of any of them may have overflowed: the pass counts for each
        flag = None if other is scaler else other.adjust(found_inf)
        if flag is not None:
            overflows.append((other, flag))
    return overflows


def leave_pending(optimizers: Sequence[Optimizer], scaler: LossScaler, scale: torch.Tensor | None) -> None:
    """Leave the gradients of a pass as they are, scaled, to a later block or to the step."""
    sets = sets_of(optimizers)
    pending = Pending(scaler.scale_on() if scale is None else scale, {scaler: None})
    for gradient_set in sets:
        if gradient_set.pending is not None:
            pending.scalers.update(gradient_set.pending.scalers)
    for gradient_set in sets:
        gradient_set.block = None
        gradient_set.pend(pending)


def end_pending(gradient_set: GradientSet) -> None:
    """End the backward pass that ``delay_unscale`` has left in a set and others, before its gradients are used."""
    pending = gradient_set.pending
    if pending is None:
        return
    together = [gradient_set]
    together += [other for other in all_sets() if other.pending is pending and other is not gradient_set]
    users = dict.fromkeys(user() for each in together for user in each.users)
    optimizers = [optimizer for optimizer in users if optimizer is not None]
    scaler = next(iter(pending.scalers))
    try:
        end(together, optimizers, scaler, pending.scale)
    except BaseException:
        lose(together, scaler)
        raise


def note_users(optimizers: Iterable[Optimizer]) -> None:
    """Note that a pass of ``optimizers`` gave the gradients that are in their sets."""
    for optimizer in optimizers:
        for gradient_set in optimizer._amp_stash.sets:
            gradient_set.note_user(optimizer)


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
        gradient_set.close()
        gradient_set.note_new(has_new_grads)
        gradient_set.note_user(optimizer)


def replaced(optimizer: Optimizer, name: str, own: Callable[..., None]) -> Callable[..., None] | None:
    """What a script has put in the place of ``optimizer``'s method ``name``; None where that is our ``own``."""
    method: Callable[..., None] | None = vars(optimizer).get(name)
    return None if getattr(method, "__func__", None) is own else method


# -- passes that fail --------------------------------------------------------------------------------------------------
def lose(sets: Iterable[GradientSet], scaler: LossScaler) -> None:
    """Clear what :func:`end` left half unscaled when it raised, and have the next step skipped."""
    scaler.forget_found_inf()
    for gradient_set in sets:
        gradient_set.lose()
    say("The end of a scale_loss block raised: its gradients are cleared, and the next step is skipped.")


def undo(sets: Iterable[GradientSet], scale: torch.Tensor | None) -> None:
    """Put back what was saved when a block began; new gradients, and those pending, are cleared."""
    for gradient_set in sets:
        drop_cleared_gradients(gradient_set.masters)
        gradient_set.undo()
        mirror_to_half(gradient_set.masters, scale)
        for param, old in gradient_set.saved:
            param.grad = old
        if gradient_set.pending is not None:
            misuse.warn_of("pending gradients lost")
        gradient_set.close()
