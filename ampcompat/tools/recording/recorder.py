"""The observer that records a run: a :class:`.steps.Step` for every optimizer step."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ampcompat import _torch
from ampcompat.tools.core import CastsOff, LossScaler, Numbers, Optimizer, SkipFlag, numbers_of, steps_of_call
from ampcompat.tools.recording.memory import cuda_in_use, peak_memory
from ampcompat.tools.recording.steps import Scale, Step


@dataclass
class _Blocks:
    """The ``scale_loss`` blocks of an optimizer since its last step."""

    #: What each scaler was when its last block ended; None where gradients were left scaled until the step.
    numbers: dict[LossScaler, Numbers | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    scale: float | None = None
    grad_norm: float | None = None


@dataclass
class _Underway:
    """A step whose numbers may still be on the device."""

    step: Step
    skip: SkipFlag
    scales: list[tuple[int, Numbers]]

    def arrived(self) -> bool:
        return self.skip.arrived() and all(isinstance(one, tuple) or one.arrived() for _, one in self.scales)

    def read(self) -> Step:
        scales = []
        for loss_id, numbers in self.scales:
            scale, passes = numbers if isinstance(numbers, tuple) else numbers.read()
            scales.append(Scale(loss_id, scale, int(passes)))
        return replace(self.step, skipped=self.skip.read(), scales=scales)


class Recorder:
    """Hands each step to ``on_record``; changes no number of the run.

    Without ``measure``, it makes no host sync: the numbers are copied while the device works, and a step is handed over
    once they are there, in order. With it, each event waits for the device (several host syncs per step), so that times
    are those of finished work; what the recording itself takes is left out of them.

    Args:
        on_record: Called with each step; what it raises goes through to the script.
        measure: Whether to read losses, gradient norms, times and memory too.
    """

    def __init__(self, on_record: Callable[[Step], object], measure: bool = False) -> None:
        self._on_record = on_record
        self._measure = measure
        self._blocks: weakref.WeakKeyDictionary[Optimizer, _Blocks] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._underway: deque[_Underway] = deque()
        self.blocks = 0
        self.steps = 0
        self._last_step: float | None = None
        self._own_time = 0.0

    # -- events ------------------------------------------------------------------------------------------------------
    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Note a block and, if measured, its loss and scale."""
        self.blocks += 1
        for optimizer in optimizers:
            self._blocks_of(optimizer).numbers[scaler] = None
        if self._measure:
            self._measure_loss(loss, scaler, optimizers)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Copy the numbers of the scaler; if measured, note the norm of what has accumulated."""
        if _torch.is_capturing():  # a replay runs no Python
            return
        numbers = numbers_of(scaler)
        for optimizer in optimizers:
            self._blocks_of(optimizer).numbers[scaler] = numbers
        if self._measure:
            self._measure_gradients(optimizers)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Record the step."""
        if _torch.is_capturing():
            return
        begin = _now() if self._measure else 0.0
        self.steps += 1
        blocks = self._blocks.pop(optimizer, _Blocks())
        scales = []
        for scaler, copied in sorted(blocks.numbers.items(), key=lambda item: item[0].loss_id):
            scales.append((scaler.loss_id, numbers_of(scaler) if copied is None else copied))
        step = Step(
            step=self.steps,
            step_of_call=steps_of_call(optimizer),
            optimizer=self._optimizers.setdefault(optimizer, len(self._optimizers)),
            skipped=False,
            losses=blocks.losses,
            scale=blocks.scale,
            grad_norm=blocks.grad_norm,
        )
        if self._measure:
            if self._last_step is not None:
                step = replace(step, seconds=max(0.0, begin - self._last_step - self._own_time))
            step = replace(step, memory=peak_memory())
        self._underway.append(_Underway(step, SkipFlag(optimizer, skipped), scales))
        self.deliver(wait=self._measure)
        if self._measure:
            self._last_step = _now()
            self._own_time = 0.0

    def deliver(self, wait: bool = False) -> None:
        """Hand over steps, oldest first, as far as their numbers have arrived; all of them, if it is to wait."""
        while self._underway and (wait or self._underway[0].arrived()):
            self._on_record(self._underway.popleft().read())

    def _blocks_of(self, optimizer: Optimizer) -> _Blocks:
        return self._blocks.setdefault(optimizer, _Blocks())

    # -- measuring ---------------------------------------------------------------------------------------------------
    def _measure_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        begin = _now()
        with CastsOff():
            value = float(loss.detach().float().mean().item())
        scale = float(scaler.loss_scale())
        for optimizer in optimizers:
            blocks = self._blocks_of(optimizer)
            blocks.losses.append(value)
            blocks.scale = scale if blocks.scale is None else min(scale, blocks.scale)
        self._own_time += _now() - begin

    def _measure_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        begin = _now()
        with CastsOff():
            for optimizer in optimizers:
                self._blocks_of(optimizer).grad_norm = _grad_norm(optimizer)
        self._own_time += _now() - begin


def _grad_norm(optimizer: Optimizer) -> float | None:
    """2-norm over all gradients of ``optimizer``, in float32; None without any. One host sync per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            grad = param.grad.detach()
            if grad.is_sparse:
                grad = grad.coalesce().values()
            if grad.is_complex():
                grad = torch.view_as_real(grad)
            by_device.setdefault(grad.device, []).append(torch.linalg.vector_norm(grad, dtype=torch.float32))
    if not by_device:
        return None
    totals = [torch.linalg.vector_norm(torch.stack(norms)).item() for norms in by_device.values()]
    return float(sum(total**2 for total in totals) ** 0.5)


def _now() -> float:
    if cuda_in_use():
        torch.cuda.synchronize()
    return time.perf_counter()
