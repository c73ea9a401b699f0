"""L2 norms of lists of tensors, by the names of apex's extension.

Every function returns ``(norm, norms)``: the norm of all tensors together, float32 ``[1]``, and the norm of each,
float32 ``[n]``, if ``per_tensor_python`` asks for them (otherwise ``[0]``). Squares are summed in float32. Where a norm
is not finite, ``noop_flag`` is set to 1. An empty list has the norm 0. Nothing synchronises with the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _layerwise
from ampcompat.multi_tensor_apply.lists import (
    Lists,
    by_computing_dtype,
    by_dtype,
    computing_dtype,
    flag_unless_finite,
    in_dtype,
    parallel,
)


def norms_of(tensors: list[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of each tensor (at least one), of any dtypes; ``[n]``, on their device."""

    def of_one_dtype(alike: list[Tensor]) -> Tensor:
        dtype = alike[0].dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        if is_integer:
            alike = in_dtype(alike, computing_dtype(alike[0].device.type, dtype))
        return _layerwise.norms(alike, order)

    if len({tensor.dtype for tensor in tensors}) == 1:
        return of_one_dtype(tensors)
    numbers = by_dtype(tensors, of_one_dtype)
    is_wide = any(number.dtype == torch.float64 for number in numbers)
    return torch.stack([number.double() if is_wide else number for number in numbers])


def flag_non_finite(noop_flag: Tensor, tensors: list[Tensor]) -> None:
    """Set ``noop_flag`` if an element is not finite: its tensor's largest magnitude is inf or NaN then."""
    can_be_infinite = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    if can_be_infinite:
        flag_unless_finite(noop_flag, norms_of(can_be_infinite, math.inf))


def _norm_and_flag(noop_flag: Tensor, tensors: list[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    if not tensors:
        none = torch.zeros(0, dtype=torch.float32, device=noop_flag.device)
        return none.new_zeros(1), none
    each = norms_of(tensors)
    flag_unless_finite(noop_flag, each)
    total = torch.linalg.vector_norm(each).float().reshape(1)
    return total, each.float() if per_tensor else total.new_zeros(0)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the norms of the one list of ``tensor_lists``.

    Reproduces ``csrc/multi_tensor_l2norm_kernel.cu: multi_tensor_l2norm_cuda``.
    """
    (tensors,) = parallel(tensor_lists, 1, "amp_C.multi_tensor_l2norm")
    return _norm_and_flag(noop_flag, tensors, per_tensor_python)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the norms of the one list of ``tensor_lists``.

    Reproduces ``csrc/multi_tensor_l2norm_kernel_mp.cu: multi_tensor_l2norm_mp_cuda``, which returned at once where
    ``noop_flag`` was set, with norms that nothing had written: here they are the norms.
    """
    (tensors,) = parallel(tensor_lists, 1, "amp_C.multi_tensor_l2norm_mp")
    return _norm_and_flag(noop_flag, tensors, per_tensor_python)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor_python: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Return the norms that the one list of ``tensor_lists`` has when it is multiplied by ``inv_scale``.

    The tensors stay as they are. ``inv_scale`` is a tensor of one element. Reproduces
    ``csrc/multi_tensor_l2norm_kernel.cu: multi_tensor_unscale_l2norm_cuda``.
    """
    (tensors,) = parallel(tensor_lists, 1, "amp_C.multi_tensor_unscale_l2norm")
    if not tensors:
        return _norm_and_flag(noop_flag, tensors, per_tensor_python)
    factor = inv_scale.reshape(()).to(tensors[0].device, non_blocking=True)
    wide = in_dtype(tensors, computing_dtype(tensors[0].device.type, *{tensor.dtype for tensor in tensors}))
    unscaled = _torch.foreach_mul(wide, factor.to(wide[0].dtype))
    return _norm_and_flag(noop_flag, list(unscaled), per_tensor_python)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    scale: float,
    per_tensor_python: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Set ``out = in * scale`` for the lists ``[in, out]``, and return the norms of ``in`` as it was.

    Reproduces ``csrc/multi_tensor_l2norm_scale_kernel.cu: multi_tensor_l2norm_scale_cuda``.
    """
    sources, targets = parallel(tensor_lists, 2, "amp_C.multi_tensor_l2norm_scale")
    norms = _norm_and_flag(noop_flag, sources, per_tensor_python)
    scale_to(sources, targets, scale)
    return norms


def scale_to(sources: list[Tensor], targets: list[Tensor], scale: float) -> None:
    """Set each of ``targets`` to its source times ``scale``, each in its own dtype."""
    factor = float(scale)
    for (alike,), their_targets in by_computing_dtype([sources], targets):
        _torch.foreach_copy_(their_targets, _torch.foreach_mul(alike, factor))
