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
from ampcompat.amp.half.masters import Master, align_written, push_all
from ampcompat.amp.half.record import check_replaced
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling.device_steps import StepFlag, announce, skips_on_device
from ampcompat.amp.scaling.optimizer_state import OptimizerState
from ampcompat.amp.scaling.unreduced import note_averaged
from ampcompat.amp.scaling.unscaling import any_non_finite, drop_cleared

R = TypeVar("R")


@_torch.skip_compile_of_frame
def make_or_skip_step(optimizer: Optimizer, stash: OptimizerState, original: Callable[..., Any]) -> Any:
    """Read the flags and make the step or skip it; or lend them to an optimizer that skips by itself.

    Where nothing is scaled and there are no masters, torch's own step is all there is to do.
    """
    has_masters = bool(stash.leaves.masters)
    if has_masters or stash.delayed or state.adapters or state.observers or stash.device_steps.undecided:
        make_ready(optimizer, stash)
    flags: list[StepFlag] = []
    if stash.overflows or stash.uncounted or stash.suspect:
        flags = flags_of(stash)
    decides_on_device = bool(flags) and skips_on_device(optimizer)
    if flags and not decides_on_device:
        if stash.device_steps.undecided:
            stash.device_steps.report_all()
        overflowed = flags_set(flags)
        if overflowed:
            announce_skip(overflowed)
            finish(optimizer, stash, skipped=True)
            return None
    update = functools.partial(update_weights, optimizer, stash, original) if has_masters else original
    if decides_on_device:
        result = stash.device_steps.step(optimizer, flags, update)
        finish(optimizer, stash, skipped=None)
    else:
        result = update()
        finish(optimizer, stash, skipped=False)
    return result


# -- before it ---------------------------------------------------------------------------------------------------------
@_torch.eager
def make_ready(optimizer: Optimizer, stash: OptimizerState) -> None:
    """Make the scale and the masters ready for a step."""
    if stash.delayed:
        stash.make_delayed_transitions()
    if stash.unreduced is not None:
        note_averaged(stash)
    if stash.device_steps.undecided:
        stash.device_steps.report_arrived()
    masters = stash.leaves.masters
    if masters:
        drop_cleared(masters)
        check_replaced(masters)
        align_written(masters)
    if state.observers:
        notify("before_step", optimizer)


# -- overflows ---------------------------------------------------------------------------------------------------------
@_torch.eager
def flags_of(stash: OptimizerState) -> list[StepFlag]:
    """The flags any of which skips the next step."""
    flags: list[StepFlag] = []
    for scaler, flag in stash.overflows.items():
        flags.append(StepFlag(scaler, flag))
    for overflow in stash.uncounted.values():
        if not overflow.is_decided:
            flags.append(StepFlag(overflow.scaler, overflow.flag))
    if stash.suspect:
        gradients = stash.leaves.gradients()
        if gradients:
            flags.append(StepFlag(None, any_non_finite(gradients)))
    return flags


@_torch.eager
def flags_set(flags: list[StepFlag]) -> list[StepFlag]:
    """Read which of ``flags`` (at least one) are set: one host sync."""
    first = flags[0].flag
    if len(flags) == 1:
        return flags if first.item() else []
    values = torch.stack([flag.to(first.device) for _, flag in flags]).to("cpu").tolist()
    return [flag for flag, value in zip(flags, values, strict=True) if value]


@_torch.eager
def announce_skip(overflowed: list[StepFlag]) -> None:
    """Say which scalers' overflows skip a step: one host sync for each scale."""
    scalers = [scaler for scaler, _ in overflowed]
    announce([(scaler, 0.0 if scaler is None else scaler.scale_after_back_off().item()) for scaler in scalers])


# -- the step itself ---------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def update_weights(
    optimizer: Optimizer, stash: OptimizerState, original: Callable[..., R], *args: Any, **kwargs: Any
) -> R:
    """Call the optimizer's own step, and write the masters to the model as soon as it has updated them.

    Hooks of the script find the model as in plain torch: pre-hooks before the update, post-hooks after it.
    """
    if not stash.leaves.masters:
        return original(*args, **kwargs)
    masters = stash.leaves.masters
    if not _torch.has_step_hooks(optimizer):
        result = original(*args, **kwargs)
        push(masters)
        return result
    align = functools.partial(align_written, masters)
    with _torch.around_update(optimizer, before=align, after=functools.partial(push, masters), later=align):
        return original(*args, **kwargs)


@_torch.eager
def push(masters: list[Master]) -> None:
    """Push masters that the optimizer has updated."""
    if state.observers:
        notify("before_push", masters)
    push_all(masters)


# -- after it ----------------------------------------------------------------------------------------------------------
@_torch.eager
def finish(optimizer: Optimizer, stash: OptimizerState, skipped: bool | None) -> None:
    """Note a step that was made or skipped, and tell observers; ``skipped``: None where only the device knows."""
    stash.skipped = skipped
    stash.session.steps += 1
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    try:
        if state.observers:
            notify("on_step", optimizer, skipped)
    finally:
        stash.drop_used_gradients(skipped)
