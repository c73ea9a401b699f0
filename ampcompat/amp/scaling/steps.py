"""One step of an optimizer: made, skipped by the host after an overflow, or left to an optimizer that skips by itself.

apex replaced ``step`` by a function that skips, for one step after an overflow (``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master, push_all, sync_written
from ampcompat.amp.half.record import check_replaced
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling.device_steps import announce, report_all, report_arrived, skips_on_device, step_with_flags
from ampcompat.amp.scaling.gradient_rules import end_pending
from ampcompat.amp.scaling.gradients import Overflow, pending_in
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.unscaling import any_non_finite, drop_cleared

R = TypeVar("R")


@_torch.eager
def needs_no_amp(stash: AmpOptimizerState) -> bool:
    """Whether torch's own step is all there is to do: nothing is scaled, and there are no masters."""
    has_to_look = stash.overflows or stash.suspect or stash.undecided_steps
    return not (stash.leaves.masters or has_to_look or state.pending or state.watch)


@_torch.skip_compile_of_frame
def plain_step(optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., R], **kwargs: Any) -> R:
    """Step as plain torch does."""
    result = original(**kwargs)
    finish(optimizer, stash, skipped=False)
    return result


@_torch.skip_compile_of_frame
def scaled_step(optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Read the flags and make the step or skip it; or lend them to an optimizer that skips by itself."""
    make_ready(optimizer, stash)
    flags = flags_of(stash)
    decides_on_device = bool(flags) and skips_on_device(optimizer)
    if flags and not decides_on_device:
        overflowed = read(stash, flags)
        if overflowed:
            announce_skip(overflowed)
            finish(optimizer, stash, skipped=True)
            return None
    if decides_on_device:
        step = functools.partial(update_weights, optimizer, stash, original, **kwargs)
        result = step_with_flags(optimizer, stash, flags, step)
        finish(optimizer, stash, skipped=None)
    else:
        result = update_weights(optimizer, stash, original, **kwargs)
        finish(optimizer, stash, skipped=False)
    return result


# -- before it ---------------------------------------------------------------------------------------------------------
@_torch.eager
def make_ready(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Make gradients unscaled, and masters follow the model, for a step."""
    for pending in pending_in(stash.leaves):
        end_pending(pending)
    if stash.undecided_steps:
        report_arrived(stash)
    masters = stash.leaves.masters
    if masters:
        drop_cleared(masters)
        check_replaced(masters)
        sync_written(masters)
    if state.watch is not None:
        state.watch.look_before_step(optimizer)


# -- overflows ---------------------------------------------------------------------------------------------------------
@_torch.eager
def flags_of(stash: AmpOptimizerState) -> list[Overflow]:
    """The flags any of which skips the next step."""
    if not stash.suspect:
        return stash.overflows
    gradients = stash.leaves.gradients()
    if not gradients:
        return stash.overflows
    return [*stash.overflows, Overflow(None, any_non_finite(gradients))]


@_torch.eager
def read(stash: AmpOptimizerState, flags: list[Overflow]) -> list[Overflow]:
    """Read which of ``flags`` (at least one) are set: one host sync."""
    if stash.undecided_steps:
        report_all(stash)
    first = flags[0].flag
    if len(flags) == 1:
        return flags if first.item() else []
    values = torch.stack([overflow.flag.to(first.device) for overflow in flags]).to("cpu").tolist()
    return [overflow for overflow, value in zip(flags, values, strict=True) if value]


@_torch.eager
def announce_skip(overflowed: list[Overflow]) -> None:
    """Say which scalers' overflows skip a step: one host sync for each scale."""
    scalers = [scaler for scaler, _ in overflowed]
    announce([(scaler, 0.0 if scaler is None else scaler.scale_after_back_off().item()) for scaler in scalers])


# -- the step itself ---------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def update_weights(
    optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., R], *args: Any, **kwargs: Any
) -> R:
    """Call the optimizer's own step, and write the masters to the model as soon as it has updated them.

    Hooks of the script find the model as in plain torch: pre-hooks before the update, post-hooks after it.
    """
    if not stash.leaves.masters:
        return original(*args, **kwargs)
    masters = stash.leaves.masters
    if state.watch is not None:
        state.watch.look_before_update(masters)
    if not _torch.has_step_hooks(optimizer):
        result = original(*args, **kwargs)
        push(masters)
        return result
    sync = functools.partial(sync_written, masters)
    with _torch.around_update(optimizer, before=sync, after=functools.partial(push, masters), later=sync):
        return original(*args, **kwargs)


@_torch.eager
def push(masters: list[Master]) -> None:
    """Push masters that the optimizer has updated, and warn if the step itself has written to the model."""
    if state.watch is not None:
        state.watch.look_after_update(masters)
    push_all(masters)


# -- after it ----------------------------------------------------------------------------------------------------------
@_torch.eager
def finish(optimizer: Optimizer, stash: AmpOptimizerState, skipped: bool | None) -> None:
    """Note a step that was made or skipped, and tell observers; ``skipped``: None where only the device knows."""
    stash.note_step(skipped)
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    try:
        if state.observers:
            notify("on_step", optimizer, skipped)
    finally:
        stash.drop_used_gradients(skipped)
