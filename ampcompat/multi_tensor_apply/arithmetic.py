"""Scale and axpby of lists of tensors, by the names of apex's extension.

The dtypes of a list may differ, as those of ``model.state_dict().values()`` do. Integers are computed in float64,
rounded as a cast rounds them, and are never "not finite"; half is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply.lists import Lists, by_computing_dtype, parallel
from ampcompat.multi_tensor_apply.norms import flag_non_finite, scale_to


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Set ``out = in * scale`` for the lists ``[in, out]``; flag what is not finite in ``in``.

    A tensor for ``scale`` is read by the host, as apex's binding read it.
    Reproduces ``csrc/multi_tensor_scale_kernel.cu: multi_tensor_scale_cuda``.
    """
    sources, targets = parallel(tensor_lists, 2, "amp_C.multi_tensor_scale")
    flag_non_finite(noop_flag, sources)
    scale_to(sources, targets, scale)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Set ``out = a * x + b * y`` for the lists ``[x, y, out]``; flag what is not finite in x (0), y (1) or both (-1).

    Reproduces ``csrc/multi_tensor_axpby_kernel.cu: multi_tensor_axpby_cuda``.
    """
    xs, ys, outs = parallel(tensor_lists, 3, "amp_C.multi_tensor_axpby")
    if arg_to_check in (0, -1):
        flag_non_finite(noop_flag, xs)
    if arg_to_check in (1, -1):
        flag_non_finite(noop_flag, ys)
    for (x, y), out in by_computing_dtype([xs, ys], outs):
        total = _torch.foreach_mul(x, float(a))
        _torch.foreach_add_(total, _torch.foreach_mul(y, float(b)))
        _torch.foreach_copy_(out, total)
