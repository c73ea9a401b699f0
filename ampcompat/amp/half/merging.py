"""Take what was written to half weights into their float32 masters: functions of tensors alone, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ampcompat import _torch

#: Elements that are worked on at once: on a device as many as fused kernels take in one launch.
CHUNK = 2**24
#: The same on the CPU, which has no launches: what stays in its cache.
CPU_CHUNK = 2**17


def merged(value: torch.Tensor, half: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` with the elements of ``half`` where it does not round to them in ``dtype``, bit for bit."""
    wide = half.float()
    rounded = value.to(dtype).float()
    return torch.where(_torch.bits(rounded) == _torch.bits(wide), value, wide)


@_torch.without_grad
def merge_(values: Sequence[torch.Tensor], halves: Sequence[torch.Tensor]) -> None:
    """Write :func:`merged` of each of ``values`` and its half weight into it, in fused passes over chunks."""
    for indices in in_chunks(halves):
        destinations = [values[index].detach() for index in indices]
        chosen = [halves[index].detach() for index in indices]
        flat_values = torch.cat([value.reshape(-1) for value in destinations])
        flat_halves = torch.cat([half.reshape(-1) for half in chosen])
        parts = torch.split(merged(flat_values, flat_halves, flat_halves.dtype), [half.numel() for half in chosen])
        shaped = [part.view(value.shape) for part, value in zip(parts, destinations, strict=True)]
        _torch.foreach_copy_(destinations, shaped)


def in_chunks(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The indices of ``tensors`` in parts of one device and dtype that are small enough to be worked on at once."""
    chunks: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.device, tensor.dtype)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
        chunk = sizes[kind] // (CPU_CHUNK if tensor.is_cpu else CHUNK)
        chunks.setdefault((*kind, chunk), []).append(index)
    return chunks.values()
