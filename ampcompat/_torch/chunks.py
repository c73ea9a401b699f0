"""Split tensor lists into chunks for one fused launch each, whose temporary copies are small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

#: Elements of a chunk on a device: as many as fused kernels take in one launch.
CHUNK = 2**24
#: The same on the CPU, which has no launches: what stays in its cache.
CPU_CHUNK = 2**17


def in_chunks(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """Split the indices of ``tensors`` into chunks, each of one device and one dtype."""
    chunks: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.device, tensor.dtype)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
        number = sizes[kind] // (CPU_CHUNK if tensor.is_cpu else CHUNK)
        chunks.setdefault((*kind, number), []).append(index)
    return chunks.values()
