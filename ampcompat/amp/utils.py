"""Home of names that scripts import from ``apex.amp.utils``."""

from typing import Any

import torch

from ampcompat.amp.casts.trees import map_tree

__all__ = ["is_fp_tensor", "maybe_bfloat16", "maybe_float", "maybe_half", "type_string"]


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating tensor, or nothing but such in a list or tuple."""
    if isinstance(x, (list, tuple)):
        return all(map(is_fp_tensor, x))
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def type_string(x: torch.Tensor) -> str:
    """Name the tensor type of ``x`` without its module: ``"HalfTensor"``, ``"FloatTensor"``."""
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the floating tensors in ``x`` to float16."""
    return map_tree(x, lambda t: t.half() if is_fp_tensor(t) else t)


def maybe_bfloat16(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the floating tensors in ``x`` to bfloat16, as in ROCm's fork of apex."""
    return map_tree(x, lambda t: t.bfloat16() if is_fp_tensor(t) else t)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the floating tensors in ``x`` to float32."""
    return map_tree(x, lambda t: t.float() if is_fp_tensor(t) else t)
