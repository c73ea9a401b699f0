"""One step of an optimizer: made, skipped by the host after an overflow, or left to an optimizer that skips by itself.

apex replaced ``step`` by a function that skips, for one step after an overflow (``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import push_all, sync_written
from ampcompat.amp.half.record import warn_of_replaced
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.gradient_sets import GradientSet, GradientState, Overflow
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState, announce
from ampcompat.amp.scaling.passes import end_pending
from ampcompat.amp.scaling.unscaling import any_non_finite, follow_half_gradients

R = TypeVar("R")


@_torch.eager
def needs_no_amp(stash: AmpOptimizerState) -> bool:
    """Whether torch's own step is all there is to do: nothing is scaled, and there are no masters."""
    if stash.masters or stash.undecided_steps:
        return False
    for each in stash.sets:
        if each.state is not GradientState.UNSCALED:
            return False
        if each.overflows or each.may_be_non_finite or each.has_foreign_gradients or each.dropped:
            return False
    return True


@_torch.skip_compile_of_frame
def plain_step(optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., R], **kwargs: Any) -> R:
    """Step as plain torch does."""
    result = original(**kwargs)
    for gradient_set in stash.sets:
        gradient_set.note_step(optimizer, skipped=False)
    stash.note_step(skipped=False)
    if state.observers:
        notify("on_step", optimizer, False)
    return result


@_torch.skip_compile_of_frame
def scaled_step(optimizer: Optimizer, stash: AmpOptimizerState, step: Callable[[], Any]) -> Any:
    """Make the step, or skip it on the host; or leave that to an optimizer that skips on the device."""
    is_lost = make_ready(stash)
    if is_lost:
        announce_lost()
        finish(optimizer, stash, skipped=True)
        return None
    flags = overflows_of(optimizer, stash)
    skips_on_device = bool(flags) and _skips_on_device(optimizer)
    if flags and not skips_on_device:
        overflowed = read(stash, flags)
        if overflowed:
            announce_skip(overflowed)
            finish(optimizer, stash, skipped=True)
            return None
    already_stepped = [each for each in stash.sets if each.waits_for_others(optimizer)]
    if already_stepped:
        step = functools.partial(_without_gradients, already_stepped, step)
    if skips_on_device:
        result = _with_flags(optimizer, stash, flags, step)
        finish(optimizer, stash, skipped=None)
    else:
        result = step()
        finish(optimizer, stash, skipped=False)
    return result


def _without_gradients(already_stepped: list[GradientSet], step: Callable[[], R]) -> R:
    """Step without the masters' gradients that the optimizer has stepped with, and others have yet to."""
    hidden = [(master, master.value.grad) for each in already_stepped for master in each.masters]
    for master, _ in hidden:
        master.value.grad = None
    try:
        return step()
    finally:
        for master, grad in hidden:
            master.value.grad = grad


# -- before it ---------------------------------------------------------------------------------------------------------
@_torch.eager
def make_ready(stash: AmpOptimizerState) -> bool:
    """Have unscaled gradients and masters ready for a step; return whether gradients were lost: it must be skipped."""
    for gradient_set in stash.sets:
        if gradient_set.pending is not None:
            end_pending(gradient_set)
    if stash.masters:
        _prepare_masters(stash)
    if stash.undecided_steps:
        stash.report_arrived()
    for gradient_set in stash.sets:
        gradient_set.reset_if_cleared()
    states = [gradient_set.state for gradient_set in stash.sets]
    if GradientState.LOST in states:
        return True
    _warn_of_misuse(stash, states)
    return False


def _prepare_masters(stash: AmpOptimizerState) -> None:
    """Have masters, and their gradients, follow what the script has done to the model's."""
    for gradient_set in stash.sets:
        follow_half_gradients(gradient_set)
    warn_of_replaced(stash.masters)
    sync_written(stash.masters)


def _warn_of_misuse(stash: AmpOptimizerState, states: list[GradientState]) -> None:
    """Warn of a step to which no block has given gradients, or another optimizer's; ``states``: those of its sets."""
    for each in stash.sets:
        if each.has_foreign_gradients:
            misuse.warn_of("scaled gradients of another block")
    if GradientState.UNSCALED in states:
        return
    if not stash.masters and all(scaler.is_one for scaler in stash.session.scalers):
        return
    if GradientState.EMPTY in states:
        misuse.warn_of("block without gradients")
        return
    gradient = stash.first_gradient()
    if gradient is None:
        return
    has_masters_gradients = any(master.value.grad is not None for master in stash.masters)
    if stash.had_block and (has_masters_gradients or not stash.masters):
        return  # the script has cleared what the block gave, or writes gradients itself
    if not stash.was_used(gradient):
        misuse.warn_of("no block")


# -- overflows ---------------------------------------------------------------------------------------------------------
@_torch.eager
def overflows_of(optimizer: Optimizer, stash: AmpOptimizerState) -> list[Overflow]:
    """The flags any of which skips a step of ``optimizer``."""
    overflows: dict[int, Overflow] = {}  # a block's sets have the same flag
    suspects: list[torch.Tensor] = []
    for each in stash.sets:
        has_stepped = each.waits_for_others(optimizer)
        if not has_stepped:
            for overflow in each.overflows:
                overflows[id(overflow.flag)] = overflow
        if each.may_be_non_finite or (has_stepped and each.overflows):
            suspects += each.gradients(with_masters=not has_stepped)
    if suspects:
        still_there = any_non_finite(suspects)
        overflows[id(still_there)] = Overflow(None, still_there)
    return list(overflows.values())


@_torch.eager
def read(stash: AmpOptimizerState, overflows: list[Overflow]) -> list[Overflow]:
    """Read which of ``overflows`` (at least one) are set: one host sync."""
    if stash.undecided_steps:
        stash.report_all()
    first = overflows[0].flag
    if len(overflows) == 1:
        values = [first.item()]
    else:
        values = torch.stack([overflow.flag.to(first.device) for overflow in overflows]).to("cpu").tolist()
    return [overflow for overflow, value in zip(overflows, values, strict=True) if value]


@_torch.eager
def announce_lost() -> None:
    """Say that a step is skipped whose gradients the failed end of a block has cleared."""
    say("Gradients of a scale_loss block were lost.  Skipping step")


@_torch.eager
def announce_skip(overflowed: list[Overflow]) -> None:
    """Say of which scalers an overflow skips a step: one host sync for each scale."""
    scalers = [scaler for scaler, _ in overflowed]
    announce([(scaler, 0.0 if scaler is None else scaler.scale_after_back_off().item()) for scaler in scalers])


@_torch.eager
def _skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` looks at its ``found_inf``, and skips on the device (torch's ``fused=True``)."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        return False
    if name not in vars(optimizer) and not hasattr(type(optimizer), name):
        return False  # a wrapper that passes on what the one inside says
    # Skip on the host a step that would make momentum: torch's fused SGD leaves it uninitialised if told to skip.
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                return False
    return True


def _with_flags(optimizer: Optimizer, stash: AmpOptimizerState, flags: list[Overflow], step: Callable[[], R]) -> R:
    """Step with ``flags`` lent to the optimizer; the message follows when they have reached the host."""
    optimizer.grad_scale = None
    optimizer.found_inf = _torch.any_of([flag for _, flag in flags])
    try:
        result = step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    copies = []
    for scaler, flag in flags:
        scale = flag if scaler is None else scaler.scale_after_back_off()
        copies.append((scaler, _torch.HostCopy([flag, scale])))
    stash.undecided_steps = [*stash.undecided_steps, copies]
    return result


# -- after it ----------------------------------------------------------------------------------------------------------
@_torch.eager
def finish(optimizer: Optimizer, stash: AmpOptimizerState, skipped: bool | None) -> None:
    """After the optimizer's own step, or instead of it: the masters' gradients are used up, the model's stay.

    ``skipped``: None where only the device knows.
    """
    if stash.masters and not skipped:
        push_all(stash.masters)
    stash.note_step(skipped)
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    try:
        if state.observers:
            notify("on_step", optimizer, skipped)
    finally:
        for gradient_set in stash.sets:
            gradient_set.note_step(optimizer, skipped)


def gradients_for_step(optimizer: Optimizer, stash: AmpOptimizerState) -> list[torch.Tensor]:
    """The gradients that a step of ``optimizer`` uses."""
    gradients: list[torch.Tensor] = []
    for each in stash.sets:
        gradients += each.gradients(with_masters=not each.waits_for_others(optimizer))
    return gradients
