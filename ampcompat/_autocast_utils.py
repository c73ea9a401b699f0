"""Home of a name that scripts import from ``apex._autocast_utils``."""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.casts.trees import map_tree

__all__ = ["_cast_if_autocast_enabled"]


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Return ``args``, floating tensors in the dtype of the autocast region that is in force on their device, if any.

    Lists, tuples and mappings are looked into; float64 tensors stay, as autocast leaves them. apex looked at CUDA alone
    (``apex/_autocast_utils.py: _cast_if_autocast_enabled``).
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        device_type = tensor.device.type
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if not _torch.can_autocast(device_type) or not torch.is_autocast_enabled(device_type):
            return tensor
        return tensor.to(torch.get_autocast_dtype(device_type))

    return map_tree(args, cast, objects=False)
