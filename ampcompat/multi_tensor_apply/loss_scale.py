"""The update of a loss scale that tolerates a few overflows, by the name of apex's extension."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale and its counts in place as ``GradScaler`` does, but back off after ``hysteresis`` overflows.

    An overflow before that only starts the count to the next growth anew. A clean step restores the tolerance.
    No host sync. Reproduces ``csrc/update_scale_hysteresis.cu: update_scale_hysteresis_cuda``.

    Args:
        current_scale: The loss scale, float32, one element.
        growth_tracker: Clean steps in a row, int32, one element.
        hysteresis_tracker: Overflows that are left until the scale falls, int32, one element.
        found_inf: Not 0 after an overflow, float32, one element.
        growth_factor: What the scale grows by.
        backoff_factor: What it falls by.
        growth_interval: Clean steps until it grows.
        hysteresis: What ``hysteresis_tracker`` is after a clean step.

    Returns:
        ``current_scale``.
    """
    overflowed = found_inf.reshape(hysteresis_tracker.shape) > 0
    remaining = hysteresis_tracker - overflowed.to(hysteresis_tracker.dtype)
    is_tolerated = overflowed & (remaining > 0)
    scale = current_scale.clone()
    clean_steps = growth_tracker.clone()
    _torch.update_scale_(scale, clean_steps, found_inf, growth_factor, backoff_factor, growth_interval)
    current_scale.copy_(torch.where(is_tolerated.reshape(current_scale.shape), current_scale, scale))
    growth_tracker.copy_(torch.where(is_tolerated.reshape(growth_tracker.shape), 0, clean_steps))
    hysteresis_tracker.copy_(torch.where(overflowed, remaining, hysteresis))
    return current_scale
