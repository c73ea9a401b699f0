"""Steps that the device decides about: no flag is read, and the message of a skip comes later.

An optimizer that takes ``found_inf`` (torch's ``fused=True``) skips on the device. The flags of such a step, and the
scale to name, are copied to the host meanwhile. A later block or step says which steps were skipped, as far as the
copies have arrived; ``amp.step_was_skipped`` waits for them. apex read a flag at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ampcompat import _torch
from ampcompat._types import Optimizer
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.scaling.gradients import Overflow
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState, FlagCopy
from ampcompat.amp.scaling.scaler import LossScaler

R = TypeVar("R")


@_torch.eager
def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` looks at its ``found_inf``, and skips on the device (torch's ``fused=True``)."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        return False
    if name not in vars(optimizer) and not hasattr(type(optimizer), name):
        return False  # a wrapper that passes on what the one inside says
    # The host skips a step that would create the momentum buffer: torch's fused SGD leaves it uninitialised if told to.
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                return False
    return True


def step_with_flags(optimizer: Optimizer, stash: AmpOptimizerState, flags: list[Overflow], step: Callable[[], R]) -> R:
    """Step with ``flags`` lent to the optimizer, and start their copies to the host."""
    optimizer.grad_scale = None
    optimizer.found_inf = _torch.any_of([flag for _, flag in flags])
    try:
        result = step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    copies: list[FlagCopy] = []
    for scaler, flag in flags:
        scale = flag if scaler is None else scaler.scale_after_back_off()
        copies.append((scaler, _torch.HostCopy([flag, scale])))
    stash.undecided_steps = [*stash.undecided_steps, copies]
    return result


# -- what it has decided -----------------------------------------------------------------------------------------------
def report_arrived(stash: AmpOptimizerState) -> None:
    """Say which earlier steps the device skipped, as far as their flags have reached the host."""
    while stash.undecided_steps and all(copied.arrived() for _, copied in stash.undecided_steps[0]):
        _report(stash, stash.undecided_steps.pop(0))


def report_all(stash: AmpOptimizerState) -> None:
    """Say which earlier steps the device skipped. A host sync where flags have not reached the host."""
    while stash.undecided_steps:
        _report(stash, stash.undecided_steps.pop(0))


def _report(stash: AmpOptimizerState, flags: list[FlagCopy]) -> None:
    """Read the flags of one step, the oldest that was undecided, and say so if it was skipped."""
    overflowed: list[tuple[LossScaler | None, float]] = []
    for scaler, copied in flags:
        flag, scale = copied.read()
        if flag:
            overflowed.append((scaler, scale))
    is_last = not stash.undecided_steps
    if is_last and stash.skipped is None:
        stash.skipped = bool(overflowed)
    announce(overflowed)


def announce(overflowed: list[tuple[LossScaler | None, float]]) -> None:
    """Say which scalers' overflows skipped a step, in apex's words (``apex/amp/handle.py: scale_loss``).

    With no scaler, the step was skipped for gradients that an earlier overflow has left.
    """
    for scaler, scale in dict(overflowed).items():
        if scaler is None:
            maybe_print(
                "Gradient overflow.  Skipping step, gradients of an earlier overflow were not cleared - call"
                " zero_grad() after a skipped step (D40)."
            )
        else:
            maybe_print(
                f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scale}"
            )
