"""The functional forms: ``fused_*`` answer in the input's dtype, ``mixed_dtype_*`` in the weight's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = int | Sequence[int]


def as_shape(normalized_shape: Shape) -> list[int]:
    """``normalized_shape`` as a list: apex took an int as well."""
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _layer_norm(
    x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float, out: torch.dtype
) -> Tensor:
    # One dtype: torch's kernel keeps its statistics in float32. Mixed dtypes its CUDA kernel refuses, so widen them.
    if any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x, as_shape(shape), weight, bias, eps).to(out)


def _rms_norm(x: Tensor, shape: Shape, weight: Tensor | None, eps: float, out: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = None if weight is None else weight.to(wide)
    return F.rms_norm(x.to(wide), as_shape(shape), weight, eps).to(out)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without affine parameters, in the dtype of ``input``; ``memory_efficient`` has no effect."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weight and bias of any floating dtype; statistics in float32, result in the input's dtype."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As :func:`fused_layer_norm_affine`, with the result in the weight's dtype."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm without a weight, in the dtype of ``input``; the mean square is taken in float32."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm with a weight; result in the input's dtype."""
    return _rms_norm(input, normalized_shape, weight, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """As :func:`fused_rms_norm_affine`, with the result in the weight's dtype."""
    return _rms_norm(input, normalized_shape, weight, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm in the weight's dtype, or in float32 without a weight and for a half ``input``, as apex had it."""
    wide = torch.promote_types(input.dtype, torch.float32)
    return _rms_norm(input, normalized_shape, weight, eps, wide if weight is None else weight.dtype)


class FusedLayerNormFunction:
    """The ``autograd.Function`` behind apex's layer, for scripts that call :meth:`apply` themselves."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
        """:func:`fused_layer_norm`."""
        return fused_layer_norm(input, normalized_shape, eps, memory_efficient)


class FusedLayerNormAffineFunction:
    """The same with weight and bias."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Shape,
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        """:func:`fused_layer_norm_affine`."""
        return fused_layer_norm_affine(input, weight, bias, normalized_shape, eps, memory_efficient)


class FusedRMSNormFunction:
    """The same of RMS norms."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
        """:func:`fused_rms_norm`."""
        return fused_rms_norm(input, normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineFunction:
    """The same of RMS norms with a weight."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
    ) -> Tensor:
        """:func:`fused_rms_norm_affine`."""
        return fused_rms_norm_affine(input, weight, normalized_shape, eps, memory_efficient)
