"""Steps that the device decides about: no flag is read, and the message of a skip comes later.

An optimizer that takes ``found_inf`` (torch's ``fused=True``) skips on the device. The flags of such a step, and the
scale to name, are copied to the host meanwhile. A later block or step says which steps were skipped, as far as the
copies have arrived; ``amp.step_was_skipped`` waits for them. apex read a flag at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from ampcompat import _torch
from ampcompat._types import Optimizer
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.scaling.scaler import LossScaler

R = TypeVar("R")


class StepFlag(NamedTuple):
    """A flag that skips a step if it is set.

    Attributes:
        scaler: The scaler of the block that found it; None where the step looked at gradients that an earlier overflow
            may have left.
        flag: 0-dim float32 tensor on a device, not 0 if it is set.
    """

    scaler: LossScaler | None
    flag: torch.Tensor


#: A scaler, and the host copy of its flag and of the scale to print.
FlagCopy = tuple[LossScaler | None, _torch.HostCopy]


class DeviceSteps:
    """The steps of one optimizer that its device decided about.

    Attributes:
        undecided: Flags of the steps that the host does not know the outcome of, oldest first.
        latest_skipped: Whether the latest step whose outcome is known was skipped; None before the first.
    """

    def __init__(self) -> None:
        self.undecided: list[list[FlagCopy]] = []
        self.latest_skipped: bool | None = None

    def step(self, optimizer: Optimizer, flags: list[StepFlag], step: Callable[[], R]) -> R:
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
        self.undecided.append(copies)
        return result

    def report_arrived(self) -> None:
        """Say which steps were skipped, as far as their flags have reached the host."""
        while self.undecided and all(copied.arrived() for _, copied in self.undecided[0]):
            self._report(self.undecided.pop(0))

    @_torch.eager
    def report_all(self) -> None:
        """Say which steps were skipped. A host sync where flags have not reached the host."""
        while self.undecided:
            self._report(self.undecided.pop(0))

    def _report(self, flags: list[FlagCopy]) -> None:
        """Read the flags of one step, and say so if it was skipped."""
        overflowed: list[tuple[LossScaler | None, float]] = []
        for scaler, copied in flags:
            flag, scale = copied.read()
            if flag:
                overflowed.append((scaler, scale))
        self.latest_skipped = bool(overflowed)
        announce(overflowed)


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
