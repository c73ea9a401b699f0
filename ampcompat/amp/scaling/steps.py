"""One step of an optimizer: made, skipped by the host after an overflow, or left to an optimizer that skips by itself.

apex replaced ``step`` by a function that skips, for one step after an overflow (``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import push_all, settle
from ampcompat.amp.half.record import warn_of_replaced
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import misuse, passes
from ampcompat.amp.scaling.gradient_sets import GradientSet, GradientState
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState, announce
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import any_non_finite, look_at_half_gradients

R = TypeVar("R")
#: A flag that skips a step; no scaler: of gradients that an earlier overflow has left.
Flag = tuple[LossScaler | None, torch.Tensor]


@_torch.eager
def is_plain(stash: AmpOptimizerState) -> bool:
    """Whether blocks have left nothing but unscaled gradients: the scale is one, and there are no masters."""
    if stash.masters or stash.undecided_steps:
        return False
    for each in stash.sets:
        if each.state is not GradientState.UNSCALED:
            return False
        if each.overflows or each.has_old_overflow or each.has_foreign_gradients:
            return False
    return True


@_torch.skip_compile_of_frame
def plain_step(optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., R], **kwargs: Any) -> R:
    """Step as plain torch does."""
    result = original(**kwargs)
    for gradient_set in stash.sets:
        gradient_set.note_step(optimizer, skipped=False)
    stash.last_step.skipped = False
    stash.session.steps += 1
    if state.observers:
        notify("on_step", optimizer, False)
    return result


@_torch.skip_compile_of_frame
def scaled_step(optimizer: Optimizer, stash: AmpOptimizerState, step: Callable[[], Any]) -> Any:
    """Make the step, or skip it on the host; or leave that to an optimizer that skips on the device."""
    _end_pending(stash)  # first: what skips on the device looks at gradients
    on_device = _skips_on_device(optimizer)
    skip = prepare(optimizer, stash, on_device)
    if skip:
        finish(optimizer, stash, skipped=True)
        return None
    used = [each for each in stash.sets if each.has_stepped(optimizer)]
    if used:
        step = functools.partial(_without_gradients, used, step)
    flags = _flags(optimizer, stash) if on_device else []
    if not flags:
        result = step()
        finish(optimizer, stash, skipped=False)
        return result
    result = _with_flags(optimizer, stash, flags, step)
    finish(optimizer, stash, skipped=None)
    return result


def _without_gradients(used: list[GradientSet], step: Callable[[], R]) -> R:
    """Step without the masters' gradients of ``used``: the optimizer has stepped with them, and others have yet to."""
    hidden = [(master, master.value.grad) for each in used for master in each.masters]
    for master, _ in hidden:
        master.value.grad = None
    try:
        return step()
    finally:
        for master, grad in hidden:
            master.value.grad = grad


# -- before it ---------------------------------------------------------------------------------------------------------
@_torch.eager
def prepare(optimizer: Optimizer, stash: AmpOptimizerState, on_device: bool = False, is_skipped: bool = True) -> bool:
    """Have unscaled gradients and masters ready for a step; whether the host skips it.

    Args:
        optimizer: About to step.
        stash: Its own.
        on_device: The optimizer reads the overflow flags itself; the host reads none.
        is_skipped: After an overflow, the step is skipped, and a message says so.
    """
    _end_pending(stash)
    if stash.masters:
        _prepare_masters(stash)
    if stash.undecided_steps:
        stash.report_arrived()
    for gradient_set in stash.sets:
        gradient_set.reset_if_cleared()
    states = [each.state for each in stash.sets]
    if GradientState.LOST in states:
        return True
    _warn_of_misuse(stash, states)
    if on_device:
        return False
    flags = _flags(optimizer, stash)
    if not flags:
        return False
    if stash.undecided_steps:
        stash.report_all()
    return _read(flags, is_skipped)


def _end_pending(stash: AmpOptimizerState) -> None:
    """Unscale what blocks have left scaled."""
    for gradient_set in stash.sets:
        passes.end_pending(gradient_set)


def _prepare_masters(stash: AmpOptimizerState) -> None:
    """Have masters, and their gradients, follow what the script has done to the model's."""
    for gradient_set in stash.sets:
        look_at_half_gradients(gradient_set)
    warn_of_replaced(stash.masters)
    settle(stash.masters)


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
    used = stash.last_step.first_gradient
    if used is None or _torch.tensor_of(used) is not gradient:
        misuse.warn_of("no block")


# -- overflows ---------------------------------------------------------------------------------------------------------
def _flags(optimizer: Optimizer, stash: AmpOptimizerState) -> list[Flag]:
    """The flags any of which skips a step of ``optimizer``."""
    flags: dict[int, Flag] = {}  # a block's sets have the same flag
    suspects: list[torch.Tensor] = []
    for each in stash.sets:
        has_stepped = each.has_stepped(optimizer)
        if not has_stepped:
            for overflow in each.overflows:
                flags[id(overflow[1])] = overflow
        if each.has_old_overflow or (has_stepped and each.overflows):
            suspects += each.gradients(with_masters=not has_stepped)
    if suspects:
        still_there = any_non_finite(suspects)
        flags[id(still_there)] = (None, still_there)
    return list(flags.values())


def _read(flags: list[Flag], is_skipped: bool) -> bool:
    """Read whether one of ``flags`` is set, and say so where a step ``is_skipped`` for it.

    Host syncs: one, and one more for each scale that the message names.
    """
    first = flags[0][1]
    if len(flags) == 1:
        values = [first.item()]
    else:
        values = torch.stack([flag.to(first.device) for _, flag in flags]).to("cpu").tolist()
    if not any(values):
        return False
    overflowed = [scaler for (scaler, _), value in zip(flags, values, strict=True) if value]
    if is_skipped:
        announce([(scaler, 0.0 if scaler is None else scaler.scale_after_back_off().item()) for scaler in overflowed])
    return True


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


def _with_flags(optimizer: Optimizer, stash: AmpOptimizerState, flags: list[Flag], step: Callable[[], R]) -> R:
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
    if skipped and stash.has_state(GradientState.LOST):
        say("Gradients of a scale_loss block were lost.  Skipping step")
    gradient = stash.first_gradient()
    stash.last_step.skipped = skipped
    stash.last_step.first_gradient = None if gradient is None else weakref.ref(gradient)
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    stash.session.steps += 1
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
        gradients += each.gradients(with_masters=not each.has_stepped(optimizer))
    return gradients
