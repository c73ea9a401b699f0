"""Skipped steps of one run, made by another: float32 with the updates that a level applied is what to compare it with.

A step that an overflow costs leaves the weights one update behind, from there on; that is the price of finding the loss
scale, not a loss of precision.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.stash import Gradients
from ampcompat.tools.recording.recorder import Recorder

R = TypeVar("R")


class Skips:
    """An observer that has the steps numbered ``steps`` (from 1, over all optimizers) skipped as after an overflow.

    Args:
        recorder: The recorder of the run, which counts its steps.
        steps: The steps to skip. Only steps after a ``scale_loss`` block of their optimizer can be.
    """

    def __init__(self, recorder: Recorder, steps: Collection[int]) -> None:
        self._recorder, self._steps = recorder, frozenset(steps)

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Any]) -> None:
        """Take hold of the optimizers' ``step``, which comes after their first block."""
        for optimizer in optimizers:
            if getattr(optimizer.step, "_amp_skips", None) is not self:
                step = _wrapped(optimizer.step, self._before)
                step._amp_skips = self  # type: ignore[attr-defined]
                optimizer.step = types.MethodType(step, optimizer)

    def _before(self, optimizer: Optimizer) -> None:
        """Note an overflow where the step that begins is one to skip."""
        stash = getattr(optimizer, "_amp_stash", None)
        if stash is not None and self._recorder.steps + 1 in self._steps:
            stash.overflows = [(stash.session.scalers[0], torch.ones(()))]  # no plain block inside of a closure
            stash.gradients = Gradients.LOST  # skipped on the host, by an optimizer that would on the device too


def _wrapped(step: Callable[..., R], before: Callable[[Optimizer], None]) -> Callable[..., R]:
    @functools.wraps(getattr(step, "__func__", step))
    def wrapper(self: Optimizer, *args: object, **kwargs: object) -> R:
        before(self)
        return step(*args, **kwargs)

    return wrapper
