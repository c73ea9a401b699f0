"""Take what was written to half weights into their float32 masters: functions of tensors alone, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampcompat import _torch


def merged(value: torch.Tensor, half: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` with the elements of ``half`` where it does not round to them in ``dtype``, bit for bit."""
    wide = half.float()
    rounded = value.to(dtype).float()
    return torch.where(_torch.bits(rounded) == _torch.bits(wide), value, wide)


@_torch.without_grad
def merge_(values: Sequence[torch.Tensor], halves: Sequence[torch.Tensor]) -> None:
    """Write :func:`merged` of each of ``values`` and its half weight into it, in fused passes over chunks."""
    for indices in _torch.in_chunks(halves):
        destinations = [values[index].detach() for index in indices]
        chosen = [halves[index].detach() for index in indices]
        flat_values = torch.cat([value.reshape(-1) for value in destinations])
        flat_halves = torch.cat([half.reshape(-1) for half in chosen])
        parts = torch.split(merged(flat_values, flat_halves, flat_halves.dtype), [half.numel() for half in chosen])
        shaped = [part.view(value.shape) for part, value in zip(parts, destinations, strict=True)]
        _torch.foreach_copy_(destinations, shaped)
