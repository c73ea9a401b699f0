"""Home of names that scripts import from ``apex.amp.compat``: what held of every torch since tensors are variables."""

import torch

from ampcompat.amp.utils import is_fp_tensor

is_tensor_like = torch.is_tensor
is_floating_point = is_fp_tensor
scalar_python_val = torch.Tensor.item


def variable_is_tensor() -> bool:
    """Return True, as on every torch since 0.4."""
    return True


tensor_is_variable = variable_is_tensor
tensor_is_float_tensor = variable_is_tensor


def filter_attrs(module: object, attrs: list[str]) -> list[str]:
    """Those of ``attrs`` that ``module`` has."""
    return [name for name in attrs if hasattr(module, name)]
