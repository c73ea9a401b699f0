"""Home of names that scripts import from ``apex.amp.utils``."""

from typing import Any

import torch

from ampcompat.amp.trees import map_tree, tensors_in

has_func, get_func, set_func = hasattr, getattr, setattr


def is_nested(x: object) -> bool:
    """Whether ``x`` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating tensor, or nothing but such in a list or tuple."""
    if is_nested(x):
        return all(map(is_fp_tensor, x))
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def type_string(x: torch.Tensor) -> str:
    """The last part of ``x.type()``: "HalfTensor"."""
    return str(x.type()).rpartition(".")[2]


def collect_fp_tensor_types(args: object, kwargs: object) -> set[str]:
    """The :func:`type_string` of every floating tensor in ``args`` and ``kwargs``."""
    return {type_string(t) for t in tensors_in((args, kwargs)) if t.is_floating_point()}


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the floating tensors in ``x`` to float16."""
    return map_tree(x, lambda t: t.half() if is_fp_tensor(t) else t)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the floating tensors in ``x`` to float32."""
    return map_tree(x, lambda t: t.float() if is_fp_tensor(t) else t)
