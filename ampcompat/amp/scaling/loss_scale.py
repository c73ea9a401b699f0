"""How a loss scale moves after each backward pass: one pure function.

apex did the same in ``apex/amp/scaler.py: LossScaler.update_scale``, on the host.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from ampcompat import _torch

#: Clean passes before growth.
WINDOW = 2000
#: The smallest dynamic scale when ``min_loss_scale`` is None: a scale that reaches zero can never recover.
FLOOR = 2.0**-24
#: The largest power of two that float32 holds: a scale that reaches inf can never back off.
CEILING = 2.0**127

Number = TypeVar("Number", float, torch.Tensor)


def next_scale(
    scale: Number,
    clean_passes: Number,
    found_inf: Number,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    smallest: float,
    largest: float,
    is_within_limits: bool = False,
) -> tuple[Number, Number]:
    """Return the scale and the count of clean passes that follow a backward pass. No host sync.

    Args:
        scale: A number, or a 0-dim float32 tensor. No argument is changed.
        clean_passes: How many passes in a row had no overflow since the scale moved; a 0-dim int32 tensor next to
            ``scale``.
        found_inf: Not 0 if the pass overflowed; a 0-dim float32 tensor next to ``scale``.
        growth_factor: More than 1.
        backoff_factor: Less than 1.
        growth_interval: Clean passes before growth.
        smallest: The limit of back-off.
        largest: The limit of growth.
        is_within_limits: The caller knows that a tensor ``scale`` lies between the limits: one kernel then does what
            takes six kernels for a scale that a script wrote past a limit, which stays there until it moves.
    """
    if isinstance(scale, torch.Tensor):
        moved, counted = _torch.updated_scale(
            scale, clean_passes, found_inf, growth_factor, backoff_factor, growth_interval
        )
        if is_within_limits:
            return moved.clamp_(smallest, largest), counted
        moved = torch.where(moved > scale, moved.clamp(max=largest), moved)
        moved = torch.where(moved < scale, moved.clamp(min=smallest), moved)
        return moved, counted
    if found_inf:
        return max(smallest, scale * backoff_factor), 0
    if clean_passes + 1 == growth_interval:
        return min(largest, scale * growth_factor), 0
    return scale, clean_passes + 1
