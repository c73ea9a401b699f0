"""Follow the loss scale, step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.scaler import LossScaler
from ampcompat.tools.report import schema
from ampcompat.tools.report.record import Record

#: Steps kept; beyond, every second one is dropped (skipped ones stay).
MOST_POINTS = 2000


class Point(NamedTuple):
    """One step: its number, whether it was skipped (None: only the device knows), and the scales after it."""

    step: int
    skipped: bool | None
    scales: tuple[float | torch.Tensor, ...]


class History:
    """Steps, skips and scales of a run. Reads nothing from the device until asked."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.steps = self.blocks = self.skips = 0
        self._first: dict[int, float | torch.Tensor] = {}  # scales before their first block, by loss_id

    def block(self, scaler: LossScaler | None) -> None:
        """A block of ``scaler`` was entered."""
        self.blocks += 1
        if scaler is not None and scaler.loss_id not in self._first:
            self._first[scaler.loss_id] = _copy_of(scaler)

    def step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """One step of ``optimizer`` was made or skipped."""
        self.steps += 1
        self.skips += bool(skipped)
        scales = tuple(_copy_of(scaler) for scaler in optimizer._amp_stash.session.scalers)
        self.points.append(Point(self.steps, skipped, scales))
        if len(self.points) > MOST_POINTS:
            self.points = [p for i, p in enumerate(self.points) if i % 2 or p.skipped]

    def note(self, record: Record) -> None:
        """Note in ``record`` what happened so far. Reads the device."""
        record.history = self._read()
        record.steps, record.blocks = self.steps, self.blocks
        record.skipped = sum(point.skipped for point in record.history)

    def _read(self) -> list[schema.Point]:
        """The points as plain numbers. Reads the device."""
        found: list[schema.Point] = []
        for point in self.points:
            scales = [float(scale) for scale in point.scales]
            if found:
                before = found[-1].scales
            else:
                before = [float(self._first.get(loss_id, now)) for loss_id, now in enumerate(scales)]
            skipped = point.skipped
            if skipped is None:
                skipped = any(now < then for now, then in zip(scales, before, strict=False))
            found.append(schema.Point(point.step, skipped, scales))
        return found


def _copy_of(scaler: LossScaler) -> float | torch.Tensor:
    scale = scaler._scale
    if scale is None:
        return float(scaler._init_scale)
    return float(scale) if scale.device.type == "cpu" else scale.detach().clone()
