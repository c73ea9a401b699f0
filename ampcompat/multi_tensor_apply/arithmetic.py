"""Scale, axpby and norms of lists of tensors, by the names of apex's extension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _layerwise
from ampcompat.multi_tensor_apply._working import WorkingCopies

Lists = Sequence[Sequence[Tensor]]


def check(tensor_lists: Lists, count: int, op: str) -> None:
    """Refuse lists that are not parallel: the fused kernels would read past the end of the shorter tensor."""
    sizes = [len(tensors) for tensors in tensor_lists]
    if len(sizes) != count or len(set(sizes)) > 1:
        raise RuntimeError(f"amp_C.{op} got lists of {sizes} tensors: it takes {count} parallel lists of equal length.")
    for index, row in enumerate(zip(*tensor_lists, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in row]
        if len(set(shapes)) > 1:
            raise RuntimeError(f"amp_C.{op} got shapes {shapes} at position {index} of its lists: they must be equal.")


def _flag(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set ``noop_flag`` if an element is not finite: its tensor's largest magnitude is inf or NaN then."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        finite = _layerwise.norms(filled, math.inf).isfinite().all()
        noop_flag.copy_(torch.where(finite, noop_flag, 1))


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Set ``out = in * scale`` for the lists ``[in, out]``; flag what is not finite in ``in``.

    Reproduces ``csrc/multi_tensor_scale_kernel.cu: multi_tensor_scale_cuda``.
    """
    check(tensor_lists, 2, "multi_tensor_scale")
    sources, targets = (list(tensors) for tensors in tensor_lists)
    if not sources:
        return
    _flag(noop_flag, sources)
    copies = WorkingCopies()
    scaled = _torch.foreach_mul(copies.params(sources), scale)
    _torch.foreach_copy_(targets, scaled)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Set ``out = a * x + b * y`` for the lists ``[x, y, out]``; flag what is not finite in x (0), y (1) or both (-1).

    Reproduces ``csrc/multi_tensor_axpby_kernel.cu: multi_tensor_axpby_cuda``.
    """
    check(tensor_lists, 3, "multi_tensor_axpby")
    xs, ys, outs = (list(tensors) for tensors in tensor_lists)
    if not xs:
        return
    if arg_to_check in (0, -1):
        _flag(noop_flag, xs)
    if arg_to_check in (1, -1):
        _flag(noop_flag, ys)
    copies = WorkingCopies()
    scaled = _torch.foreach_mul(copies.params(xs), a)
    _torch.foreach_add_(scaled, _torch.foreach_mul(copies.params(ys), b))
    _torch.foreach_copy_(outs, scaled)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the L2 norm over all tensors of the list, float32 ``[1]``; with ``per_tensor`` those of each, ``[n]``.

    Reproduces ``csrc/multi_tensor_l2norm_kernel.cu: multi_tensor_l2norm_cuda``.
    """
    check(tensor_lists, 1, "multi_tensor_l2norm")
    tensors = list(tensor_lists[0])
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_zeros(0, dtype=torch.float32)
    each = _layerwise.norms(tensors).float()
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else each.new_zeros(0)
