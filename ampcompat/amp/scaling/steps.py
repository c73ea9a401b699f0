"""One step of an optimizer: made, skipped by the host after an overflow, or left to an optimizer that skips by itself.

An optimizer that takes ``found_inf`` (torch's ``fused=True``) skips on the device: no flag is read. The flags of such a
step, and the scale to name, are copied to the host meanwhile. A later step says which steps were skipped, as far as the
copies have arrived; ``amp.step_was_skipped`` waits for them.

apex replaced ``step`` by a function that skips, for one step after an overflow (``apex/amp/handle.py: scale_loss``). It
read a flag at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.half.masters import align_written, push_all
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling.clearing import clear_with_model
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, FlagCopy, OptimizerState, StepFlag
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import any_non_finite

R = TypeVar("R")


@_torch.skip_compile_of_frame
def make_or_skip_step(optimizer: AmpOptimizer, stash: OptimizerState, original: Callable[..., Any]) -> Any:
    """Read the flags and make the step or skip it; or lend them to an optimizer that skips by itself."""
    make_ready(optimizer, stash)
    flags = stash.flags()
    if flags and skips_on_device(optimizer):
        return _step_on_device(optimizer, stash, flags, original)
    if flags:
        if stash.undecided_steps:
            report_all(stash)
        overflowed = read_flags(flags)
        if overflowed:
            announce_skip(overflowed)
            finish(optimizer, stash, skipped=True)
            return None
    result = update_weights(optimizer, stash, original)
    finish(optimizer, stash, skipped=False)
    return result


# -- before it ---------------------------------------------------------------------------------------------------------
@_torch.eager
def make_ready(optimizer: AmpOptimizer, stash: OptimizerState) -> None:
    """Bring everything up to date before a step looks at its flags.

    Masters follow what a script wrote to the model and cleared there. Passes that no block has counted are counted.
    Steps whose outcome has reached the host are reported. Observers are told.
    """
    masters = stash.leaves.masters
    if masters:
        clear_with_model(masters)
        align_written(masters)
    if stash.unaveraged:
        _count_averaged(stash)
    if stash.undecided_steps:
        report_arrived(stash)
    if observer_state.observers:
        notify("before_step", optimizer)


def _count_averaged(stash: OptimizerState) -> None:
    """Count the passes of blocks that have left gradients unaveraged: the script averages by itself. No host sync."""
    gradients = stash.leaves.gradients()
    if not gradients:  # a wrapper may keep them all
        return
    found_inf = any_non_finite(gradients)
    for scaler in stash.unaveraged:
        flag = scaler.adjust(found_inf)
        if flag is not None:
            stash.note_overflow(scaler, flag)
    stash.unaveraged = []


# -- overflows ---------------------------------------------------------------------------------------------------------
@_torch.eager
def read_flags(flags: list[StepFlag]) -> list[StepFlag]:
    """Read ``flags`` (at least one), and return those that are set: one host sync."""
    _, first = flags[0]
    if len(flags) == 1:
        return flags if first.item() else []
    values = torch.stack([flag.to(first.device) for _, flag in flags]).tolist()
    return [flag for flag, value in zip(flags, values, strict=True) if value]


@_torch.eager
def announce_skip(overflowed: list[StepFlag]) -> None:
    """Say which scalers' overflows skip a step: one host sync for each scale."""
    scalers = dict.fromkeys(scaler for scaler, _ in overflowed)
    announce([(scaler, scaler.scale_after_back_off().item()) for scaler in scalers])


def announce(overflowed: list[tuple[LossScaler, float]]) -> None:
    """Say which scalers' overflows skipped a step, in apex's words (``apex/amp/handle.py: scale_loss``)."""
    for scaler, scale in dict(overflowed).items():
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scale}")


# -- on the device -----------------------------------------------------------------------------------------------------
@_torch.eager
def skips_on_device(optimizer: AmpOptimizer) -> bool:
    """Whether ``optimizer`` looks at its ``found_inf``, and skips on the device (torch's ``fused=True``)."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        return False
    if name not in vars(optimizer) and not hasattr(type(optimizer), name):
        return False  # a wrapper that passes on what the one inside says
    # The host skips a step that would create the momentum buffer: torch's fused SGD leaves the buffer uninitialised if
    # ``found_inf`` is set.
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                return False
    return True


def _step_on_device(
    optimizer: AmpOptimizer, stash: OptimizerState, flags: list[StepFlag], original: Callable[[], R]
) -> R:
    """Step with ``flags`` lent to the optimizer, and start their copies to the host."""
    optimizer.grad_scale = None
    optimizer.found_inf = _torch.any_of([flag for _, flag in flags])
    try:
        result = update_weights(optimizer, stash, original)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    copies: list[FlagCopy] = []
    for scaler, flag in flags:
        copies.append((scaler, _torch.HostCopy([flag, scaler.scale_after_back_off()])))
    stash.undecided_steps.append(copies)
    finish(optimizer, stash, skipped=None)
    return result


def report_arrived(stash: OptimizerState) -> None:
    """Say which steps were skipped, as far as their flags have reached the host."""
    while stash.undecided_steps and all(copied.arrived() for _, copied in stash.undecided_steps[0]):
        _report_oldest(stash)


@_torch.eager
def report_all(stash: OptimizerState) -> None:
    """Say which steps were skipped. A host sync where flags have not reached the host."""
    while stash.undecided_steps:
        _report_oldest(stash)


def _report_oldest(stash: OptimizerState) -> None:
    """Read the flags of the oldest of the undecided steps, and say so if it was skipped."""
    overflowed: list[tuple[LossScaler, float]] = []
    for scaler, copied in stash.undecided_steps.pop(0):
        flag, scale = copied.read()
        if flag:
            overflowed.append((scaler, scale))
    stash.device_skipped = bool(overflowed)
    announce(overflowed)


# -- the step itself ---------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def update_weights(
    optimizer: AmpOptimizer, stash: OptimizerState, original: Callable[..., R], *args: Any, **kwargs: Any
) -> R:
    """Call the optimizer's own step, and write the masters to the model as soon as it has updated them.

    Hooks of the script find the model as in plain torch: pre-hooks before the update, post-hooks after it.
    """
    masters = stash.leaves.masters
    if not masters:
        return original(*args, **kwargs)
    if not _torch.has_step_hooks(optimizer):
        result = original(*args, **kwargs)
        push_all(masters)
        return result
    align = functools.partial(align_written, masters)
    with _torch.around_update(optimizer, before=align, after=functools.partial(push_all, masters), later=align):
        return original(*args, **kwargs)


# -- after it ----------------------------------------------------------------------------------------------------------
@_torch.eager
def finish(optimizer: AmpOptimizer, stash: OptimizerState, skipped: bool | None) -> None:
    """End a step: note whether it was skipped, tell observers, forget its flags, clear gradients that it has used.

    Args:
        optimizer: Whose step.
        stash: What amp keeps with it.
        skipped: None where only the device knows.
    """
    stash.skipped = skipped
    stash.session.steps += 1
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    try:
        if observer_state.observers:
            notify("on_step", optimizer, skipped)
    finally:
        stash.forget_flags()
        stash.clear_used_gradients()
