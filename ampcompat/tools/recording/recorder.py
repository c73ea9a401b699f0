"""The observer that records a run: a :class:`.steps.Step` for every optimizer step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ampcompat import _torch
from ampcompat.tools.core import (
    CastsOff,
    LossScaler,
    Numbers,
    Optimizer,
    SkipFlag,
    numbers_of,
    scale_and_passes,
    steps_of_session,
)
from ampcompat.tools.recording.steps import Scale, Step


@dataclass
class _Blocks:
    """The ``scale_loss`` blocks of an optimizer since its last step."""

    #: What each scaler was when its last block ended; None where the step is to move its scale.
    numbers: dict[LossScaler, Numbers | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


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
            scale, passes = scale_and_passes(numbers)
            scales.append(Scale(loss_id, scale, int(passes)))
        return replace(self.step, skipped=self.skip.read(), scales=scales)


class Recorder:
    """Hands each step to ``on_record``; changes no number of the run.

    Without ``losses``, it makes no host sync: the numbers are copied while the device works, and a step is handed over
    once they are there, in order. With it, each block waits for its loss, and each step is handed over at once.

    Args:
        on_record: Called with each step; what it raises goes through to the script.
        losses: Whether to read the losses too.
    """

    def __init__(self, on_record: Callable[[Step], object], losses: bool = False) -> None:
        self._on_record = on_record
        self._reads_losses = losses
        self._blocks: weakref.WeakKeyDictionary[Optimizer, _Blocks] = weakref.WeakKeyDictionary()
        self._underway: deque[_Underway] = deque()
        self.blocks = 0
        self.steps = 0

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Note a block and, if asked to, its loss."""
        self.blocks += 1
        for optimizer in optimizers:
            self._blocks_of(optimizer).numbers[scaler] = None
        if not self._reads_losses:
            return
        with CastsOff():
            value = float(loss.detach().float().mean().item())
        for optimizer in optimizers:
            self._blocks_of(optimizer).losses.append(value)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Copy the numbers of the scaler."""
        if _torch.is_capturing():  # a replay runs no Python
            return
        numbers = numbers_of(scaler)
        for optimizer in optimizers:
            self._blocks_of(optimizer).numbers[scaler] = numbers

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Record the step."""
        if _torch.is_capturing():
            return
        self.steps += 1
        blocks = self._blocks.pop(optimizer, _Blocks())
        scales = []
        for scaler, copied in sorted(blocks.numbers.items(), key=lambda item: item[0].loss_id):
            scales.append((scaler.loss_id, numbers_of(scaler) if copied is None else copied))
        step = Step(
            step=self.steps,
            step_of_session=steps_of_session(optimizer),
            skipped=False,
            losses=blocks.losses,
        )
        self._underway.append(_Underway(step, SkipFlag(optimizer, skipped), scales))
        self.deliver(wait=self._reads_losses)

    def deliver(self, wait: bool) -> None:
        """Hand over steps, oldest first, as far as their numbers have arrived; all of them, if it is to wait."""
        while self._underway and (wait or self._underway[0].arrived()):
            self._on_record(self._underway.popleft().read())

    def _blocks_of(self, optimizer: Optimizer) -> _Blocks:
        return self._blocks.setdefault(optimizer, _Blocks())
