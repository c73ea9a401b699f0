"""Every private torch call and every version check of the project.

When a new torch breaks something, this is the file to mend.
"""

from __future__ import annotations

from typing import Final

import torch
from packaging.version import Version

TORCH: Final = Version(torch.__version__.split("+")[0])

# --- multi-tensor arithmetic: lists of tensors in one launch where the device has a kernel ---------------------------
# The lists of one call are on one device, of one dtype, and laid out alike: the fused kernels walk raw memory and, on
# 2.4 and 2.13, silently mix up elements when the strides of a param and its gradient differ.

foreach_abs_ = torch._foreach_abs_
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_


def has_fused_kernels(device: torch.device) -> bool:
    """Whether torch's own optimizers would accept ``fused=True`` for params on ``device``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
