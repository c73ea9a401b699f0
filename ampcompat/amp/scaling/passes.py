"""One backward pass of a ``scale_loss`` block: its beginning and end, in all gradient sets of the block's optimizers.

``gradient_sets`` has the table of what each does. apex did the same in ``apex/amp/handle.py: scale_loss`` and
``apex/amp/_process_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import drop_cleared_gradients, sync_written
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.gradient_sets import (
    GradientSet,
    GradientState,
    OpenBlock,
    Overflow,
    Pending,
    all_sets,
    is_a_block_open,
    sets_of,
)
from ampcompat.amp.scaling.legacy_methods import save_or_prepare, unscale_by_scripts
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import follow_half_gradients, mirror_to_half, rescale_pending, unscale_new


# -- its beginning -----------------------------------------------------------------------------------------------------
def begin(optimizers: Sequence[Optimizer], block: OpenBlock, scaler: LossScaler, delay: bool) -> None:
    """Save older gradients for a backward pass; ``delay``: its end leaves its gradients scaled."""
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        if stash.undecided_steps:
            stash.report_arrived()
        if stash.masters and scaler.watched_blocks < misuse.WATCHED:
            _warn_of_plain_gradients(stash)
    sets = sets_of(optimizers)
    for gradient_set in all_sets() if state.optimizers.grouped > 1 else sets:
        follow_half_gradients(gradient_set)  # of other sets too, before the backward pass may add to them
    for gradient_set in sets:
        gradient_set.reset_if_cleared()
        gradient_set.begin_anew(optimizers)
        if gradient_set.pending is not None:
            rescale_pending(gradient_set, gradient_set.pending, scaler)
    for optimizer in optimizers:
        save_or_prepare(optimizer, delay)
        for gradient_set in optimizer._amp_stash.sets:
            gradient_set.begin_block(block)


def _warn_of_plain_gradients(stash: AmpOptimizerState) -> None:
    """Warn of gradients of half weights that no block gave: this one drops them."""
    if any(each.state not in (GradientState.NONE, GradientState.EMPTY) for each in stash.sets):
        return
    for master in stash.masters:
        gradient = master.half.grad
        if gradient is None:
            continue
        is_of_no_block = master.added_grad is None and not stash.was_used(gradient)
        if is_of_no_block and gradient.any():  # a host sync, in the first blocks alone; zeros are cleared gradients
            misuse.warn_of("plain gradients dropped")
        return


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
    new = unscale_by_scripts(optimizers, scaler)
    for gradient_set in sets:
        if gradient_set not in new:
            new[gradient_set] = unscale_new(gradient_set, scaler, scale)
    overflows = _make_transitions(scaler, scale, pending_scalers, moves_scale)
    has_new_grads = True in new.values()
    for gradient_set in sets:
        gradient_set.end_block()
        gradient_set.note_new(new[gradient_set], has_new_grads)
        if overflows:
            gradient_set.note_overflows(overflows)
    return has_new_grads


def _make_transitions(
    scaler: LossScaler, scale: torch.Tensor | None, pending_scalers: dict[LossScaler, None], moves_scale: bool
) -> list[Overflow]:
    """Have every scaler of a backward pass count it; return the flags that steps must look at."""
    if scale is None:  # a static scale of one
        if moves_scale:
            scaler.count_clean_pass()
        return []
    found_inf = scaler.take_found_inf()
    overflows: list[Overflow] = []
    flag = scaler.adjust(found_inf) if moves_scale else scaler.delay(found_inf)
    if flag is not None:
        overflows.append(Overflow(scaler, flag))
    for other in pending_scalers:  # the loss of any of them may have overflowed: the pass counts for each
        flag = None if other is scaler else other.adjust(found_inf)
        if flag is not None:
            overflows.append(Overflow(other, flag))
    return overflows


def note_users(optimizers: Iterable[Optimizer]) -> None:
    """Note that a pass of ``optimizers`` gave the gradients that are in their sets."""
    for optimizer in optimizers:
        optimizer._amp_stash.had_block = True
        for gradient_set in optimizer._amp_stash.sets:
            gradient_set.note_user(optimizer)


# -- passes whose gradients stay scaled --------------------------------------------------------------------------------
def leave_pending(
    sets: Sequence[GradientSet], scaler: LossScaler, scale: torch.Tensor | None, is_unsynced: bool
) -> None:
    """Leave the gradients of a pass as they are, scaled, to a later block or to the step."""
    pending = Pending(scaler.scale_on() if scale is None else scale, {scaler: None}, is_unsynced)
    for gradient_set in sets:
        if gradient_set.pending is not None:
            pending.scalers.update(gradient_set.pending.scalers)
    for gradient_set in sets:
        gradient_set.leave_pending(pending)


def end_pending(gradient_set: GradientSet) -> None:
    """End the backward pass that ``delay_unscale`` has left in a set and others, before its gradients are used."""
    pending = gradient_set.pending
    if pending is None:
        return
    sets_of_pass = [gradient_set]
    sets_of_pass += [other for other in all_sets() if other.pending is pending and other is not gradient_set]
    users = dict.fromkeys(user() for each in sets_of_pass for user in each.users)
    optimizers = [optimizer for optimizer in users if optimizer is not None]
    scaler = next(iter(pending.scalers))
    try:
        end(sets_of_pass, optimizers, scaler, pending.scale)
    except BaseException:
        lose(sets_of_pass, scaler)
        raise


def show_masters(optimizer: Optimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients. Outside of blocks, a pass of ``delay_unscale`` ends:
    its gradients are unscaled, and the scale moves. A script may end an accumulation early, clip, and step.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    drop_cleared_gradients(stash.masters)
    if stash.in_block:
        return
    stash.look_up(optimizer)
    block_is_open = is_a_block_open()  # of another optimizer
    for gradient_set in stash.sets:
        pending = gradient_set.pending
        if pending is None or block_is_open:
            continue
        if pending.is_unsynced:
            misuse.warn_of("unsynced gradients read")
        else:
            end_pending(gradient_set)
    sync_written(stash.masters)


# -- passes that fail --------------------------------------------------------------------------------------------------
def lose(sets: Iterable[GradientSet], scaler: LossScaler) -> None:
    """Clear what an exception has left half unscaled, and have the next step skipped."""
    scaler.forget_found_inf()
    for gradient_set in sets:
        gradient_set.lose()
    say("The end of a scale_loss block raised: its gradients are cleared, and the next step is skipped.")


def undo(sets: Iterable[GradientSet], scale: torch.Tensor | None) -> None:
    """Put back what was saved when a block began; new gradients, and those pending, are cleared."""
    for gradient_set in sets:
        drop_cleared_gradients(gradient_set.masters)  # as at the end of a block
        gradient_set.clear_scaled()
        mirror_to_half(gradient_set.masters, scale)
        for param, old in gradient_set.saved:
            param.grad = old
        if gradient_set.pending is not None:
            misuse.warn_of("pending gradients lost")
        gradient_set.end_block()
