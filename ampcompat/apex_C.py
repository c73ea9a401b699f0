"""apex's flatten and unflatten extension, as ``apex_C``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate ``tensors``, all of one dtype, to one vector of shape ``(total,)``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of ``flat``, of shape ``(total,)``, in the shapes of ``tensors``."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return tuple(piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True))
