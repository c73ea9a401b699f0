"""Follow the loss scale, step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.scaler import LossScaler
from ampcompat.tools.report import schema
from ampcompat.tools.report.record import Record
from ampcompat.tools.scale_log import Skip

#: Steps kept; beyond, every second one is dropped (skipped ones stay).
MOST_POINTS = 2000


class Point(NamedTuple):
    """One step: its number, whether it was skipped, and the scales after it."""

    step: int
    skip: Skip
    scales: tuple[float | torch.Tensor, ...]


class History:
    """Steps, skips and scales of a run. Waits for the device only when it is asked."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.steps = self.blocks = 0

    def step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """One step of ``optimizer`` was made or skipped."""
        self.steps += 1
        scales = tuple(_copy_of(scaler) for scaler in optimizer._amp_stash.session.scalers)
        self.points.append(Point(self.steps, Skip(optimizer, skipped), scales))
        if len(self.points) > MOST_POINTS:
            self.points = [point for at, point in enumerate(self.points) if at % 2 or _may_be_skipped(point)]

    def note(self, record: Record) -> None:
        """Note in ``record`` what happened so far. Reads the device."""
        record.history = [
            schema.Point(point.step, point.skip.read(), [float(scale) for scale in point.scales])
            for point in self.points
        ]
        record.steps, record.blocks = self.steps, self.blocks
        record.skipped = sum(point.skipped for point in record.history)


def _may_be_skipped(point: Point) -> bool:
    """Whether a step was skipped, or that is not known yet."""
    return not point.skip.arrived() or point.skip.read()


def _copy_of(scaler: LossScaler) -> float | torch.Tensor:
    scale = scaler.core.scale
    if scale is None:
        return scaler.core.initial
    return float(scale) if scale.device.type == "cpu" else scale.detach().clone()
