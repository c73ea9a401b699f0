"""Lists of ``torch.Tensor``, as ``apex/amp/lists/tensor_overrides.py`` named them: operators, and ``torch``'s names."""

import torch

from ampcompat.amp.lists import torch_overrides

MODULE = torch.Tensor


def _methods(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(torch.Tensor, name)]


FP16_FUNCS = ["__matmul__", *_methods(torch_overrides.FP16_FUNCS)]

FP32_FUNCS = [
    *("__pow__", "__ipow__", "__rpow__"),
    "cpu",  # what leaves for numpy leaves in float32
    *_methods(torch_overrides.FP32_FUNCS),
]

CASTS = [
    *("__add__", "__sub__", "__mul__", "__div__", "__truediv__"),
    *("__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__"),
    *("__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"),
    *("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"),
    *_methods(torch_overrides.CASTS),
]

SEQUENCE_CASTS = _methods(torch_overrides.SEQUENCE_CASTS)
