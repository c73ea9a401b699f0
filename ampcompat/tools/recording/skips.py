"""Make a run skip given steps, as after an overflow, so that it can be compared with one that did."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ampcompat.tools.core import LossScaler, Optimizer, wrap_step
from ampcompat.tools.recording.recorder import Recorder


class Skips:
    """An observer that skips the steps numbered ``steps`` (over all optimizers), as after an overflow.

    They cost a level an update each, from there on: the price of finding the loss scale, not a loss of precision.

    Args:
        recorder: It observes the same run, and numbers its steps.
        steps: The numbers of those to skip.
    """

    def __init__(self, recorder: Recorder, steps: Collection[int]) -> None:
        self._recorder = recorder
        self._steps = steps
        self._ask = self._must_skip  # one object, by which a wrapped step is known

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Take hold of the optimizers' ``step``, which comes after their first block."""
        for optimizer in optimizers:
            wrap_step(optimizer, self._ask)

    def _must_skip(self, _optimizer: Optimizer) -> bool:
        return self._recorder.steps + 1 in self._steps
