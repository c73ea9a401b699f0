"""The scale of a loss, and how it moves after each backward pass: a static scale, or a dynamic one.

A scale is a 0-dim tensor on the device of its losses, made with the first of them, and moves there without a host sync.
Its whole transition is :func:`next_scale`; apex's was ``apex/amp/scaler.py: LossScaler.update_scale``, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcompat import _torch

#: Clean passes before growth.
WINDOW = 2000
#: The smallest dynamic scale when ``min_loss_scale`` is None: a scale that reaches zero can never recover.
FLOOR = 2.0**-24


def next_scale(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    smallest: float,
    largest: float,
    is_within_limits: bool = True,
) -> torch.Tensor:
    """Return the scale that follows ``scale``, and count the pass in ``tracker``. No host sync.

    * ``found_inf`` is set: ``max(smallest, scale * backoff_factor)``; the tracker becomes 0.
    * else the tracker counts one more clean pass; at ``growth_interval`` it becomes 0, and the scale
      ``min(largest, scale * growth_factor)``.
    * else ``scale`` as it is.

    Args:
        scale: 0-dim float32; stays as it is, since a block that holds it still unscales by what it scaled by.
        tracker: 0-dim int32 on the device of ``scale``: the clean passes since the scale moved; written in place.
        found_inf: 0-dim float32 on the device of ``scale``, not 0 after an overflow.
        growth_factor: More than 1.
        backoff_factor: Less than 1.
        growth_interval: Clean passes before growth.
        smallest: The limit of back-off.
        largest: The limit of growth.
        is_within_limits: Whether ``scale`` lies between the limits. Then one clamp does what takes six kernels else,
            since a scale that a script wrote past a limit stays there until it moves.
    """
    moved = scale.clone()
    _torch.update_scale_(moved, tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    if is_within_limits:
        return moved.clamp_(smallest, largest)
    moved = torch.where(moved > scale, moved.clamp(max=largest), moved)
    return torch.where(moved < scale, moved.clamp(min=smallest), moved)


@dataclass(eq=False)
class StaticLossScale:
    """A scale that stays as it is. It counts clean passes, as apex's did.

    Attributes:
        initial: What the scale is made with, or was last set to by the host.
        initial_clean_passes: The same of the count.
        scale: 0-dim float32, None before the first loss. Each move makes a new one: a block unscales by what it scaled.
        clean_passes: 0-dim int32 on the same device: passes since the scale moved.
        growth_factor, backoff_factor, growth_interval, smallest, largest: As in :func:`next_scale`.
    """

    initial: float
    initial_clean_passes: int = 0
    scale: torch.Tensor | None = None
    clean_passes: torch.Tensor | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = WINDOW
    smallest: float = FLOOR
    largest: float = 2.0**24

    def make(self, device: torch.device) -> torch.Tensor:
        """Return the scale; its tensors are made on ``device`` if there are none yet."""
        if self.scale is None:
            self.scale = torch.full((), self.initial, dtype=torch.float32, device=device)
            self.clean_passes = torch.full((), self.initial_clean_passes, dtype=torch.int32, device=device)
        return self.scale

    def on(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the scale on ``device``, or where it is; no host sync."""
        if self.scale is None:
            return torch.full((), self.initial, device=device or "cpu")
        return self.scale if device is None else self.scale.to(device, non_blocking=True)

    def read(self) -> float:
        """Return the scale as a number: one host sync."""
        return self.initial if self.scale is None else float(self.scale.item())

    def read_clean_passes(self) -> int:
        """Return the count as a number: one host sync."""
        return self.initial_clean_passes if self.clean_passes is None else int(self.clean_passes.item())

    def write(self, number: float) -> None:
        """Set the scale; what is scaled already keeps its own."""
        self.initial = number
        if self.scale is not None:
            self.scale = torch.full_like(self.scale, number)

    def write_clean_passes(self, count: int) -> None:
        """Set the count."""
        self.initial_clean_passes = count
        if self.clean_passes is not None:
            self.clean_passes = torch.full_like(self.clean_passes, count)

    def adjust(self, found_inf: torch.Tensor) -> None:
        """Count a pass; ``found_inf`` moves nothing."""
        self.count_clean_pass()

    def count_clean_pass(self) -> None:
        """Count a pass, on the device once the scale is there."""
        if self.clean_passes is None:
            self.initial_clean_passes += 1
        else:
            self.clean_passes.add_(1)


@dataclass(eq=False)
class DynamicLossScale(StaticLossScale):
    """A scale that backs off after an overflow, and grows after enough clean passes."""

    def adjust(self, found_inf: torch.Tensor) -> None:
        """Back off, or grow, or only count, after a pass with the flag ``found_inf``.

        While a CUDA graph is captured the scale moves in place, since each replay begins with the tensor of the
        capture.
        """
        scale = self.make(found_inf.device)
        moved = next_scale(
            scale,
            self.clean_passes,  # type: ignore[arg-type] # made with the scale
            found_inf,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            smallest=self.smallest,
            largest=self.largest,
            # What the host last wrote: from there on, moves end at the limits.
            is_within_limits=self.smallest <= self.initial <= self.largest,
        )
        if _torch.is_capturing():
            scale.copy_(moved)
        else:
            self.scale = moved

    def after_back_off(self) -> torch.Tensor:
        """Return what the scale would be after an overflow. No host sync."""
        return (self.on() * self.backoff_factor).clamp(min=self.smallest)
