"""Home of names that scripts import from ``apex.amp.utils``."""

from collections.abc import Callable
from typing import Any

import torch

from ampcompat.amp.casts.trees import map_tree

__all__ = ["cached_cast", "is_fp_tensor", "is_nested", "maybe_bfloat16", "maybe_float", "maybe_half", "type_string"]


def is_nested(x: object) -> bool:
    """Whether ``x`` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating tensor, or a list or tuple of nothing else."""
    if is_nested(x):
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


def cached_cast(cast_fn: Callable[[Any], Any], x: Any, cache: dict[torch.Tensor, torch.Tensor]) -> Any:
    """``cast_fn(x)`` for a floating tensor, or each one in nested lists and tuples; ``cache`` keeps what was cast.

    The caller clears ``cache`` when weights change. A cast that was made without a gradient is made anew where one is
    needed.
    """
    if is_nested(x):
        return type(x)([cached_cast(cast_fn, item, cache) for item in x])
    cached = cache.get(x)
    if cached is not None:
        needs_no_grad = not torch.is_grad_enabled()
        if needs_no_grad or cached.requires_grad == x.requires_grad:
            return cached
    cache[x] = cast_fn(x)
    return cache[x]
