"""Describe how a device handles half precision."""

from __future__ import annotations

import torch

from ampcompat import _torch
from ampcompat.tools.dtypes import dtype_name

#: The compute capability from which a CUDA device has tensor cores for a half dtype.
LEAST_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}


def slow_halves(device_type: str, half: torch.dtype) -> str:
    """Why ``half`` is not fast on ``device_type``, in one sentence; "" where it is, or where that is not known."""
    name = dtype_name(half)
    if device_type == "cpu" and half in _torch.halves_without_cpu_convolution():
        return f"This CPU has no {name} arithmetic: half precision is emulated here and saves memory, not time."
    if device_type == "cuda" and torch.cuda.is_available():
        return slow_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name(), half)
    return ""


def slow_capability(capability: tuple[int, int], device: str, half: torch.dtype) -> str:
    """The same for a CUDA device of compute capability ``capability``."""
    least = LEAST_CAPABILITY[half]
    if capability >= least:
        return ""
    name = dtype_name(half)
    return (
        f"{device} has compute capability {capability[0]}.{capability[1]}: no tensor cores for {name}"
        f" ({least[0]}.{least[1]} or more has them), so it saves memory and little time."
    )
