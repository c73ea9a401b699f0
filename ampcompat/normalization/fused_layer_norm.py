"""The modules: subclasses of torch's, so that ``isinstance`` checks and state_dict keys are torch's and apex's."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat.normalization.functional import (
    FusedLayerNormAffineFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormFunction,
    Shape,
    as_shape,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


class _Fused(torch.nn.Module):
    """Take apex's arguments for a norm of torch's, which comes next in the order of base classes."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(as_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_Fused, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` that answers in the dtype of its input, whatever the dtype of its parameters.

    Args:
        normalized_shape: Trailing shape over which to normalize.
        eps: Added to the variance.
        elementwise_affine: Whether there are a ``weight`` and a ``bias``.
        memory_efficient: Accepted and without effect: torch chooses what it saves for backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(*, *normalized_shape)``; same shape and dtype come back."""
        if not self.elementwise_affine:
            return fused_layer_norm(input, self.normalized_shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_Fused, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with apex's default ``eps``, answering in the dtype of its input.

    Arguments are those of :class:`FusedLayerNorm`; there is a ``weight`` and no ``bias``.
    """

    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape ``(*, *normalized_shape)``; same shape and dtype come back."""
        if not self.elementwise_affine:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


def _affine_only(name: str, options: dict[str, object]) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError(
            f"elementwise_affine=False - {name} does not support it: its result has the weight's dtype - "
            f"use {name.removeprefix('Mixed')}."
        )
    if options:
        raise TypeError(f"{name}: unexpected keyword arguments {sorted(options)} - remove them.")


class MixedFusedLayerNorm(FusedLayerNorm):
    """:class:`FusedLayerNorm` that answers in the dtype of its weight; always affine (``RuntimeError`` otherwise)."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: object
    ) -> None:
        _affine_only("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``; the result has its shape and the weight's dtype."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """:class:`FusedRMSNorm` that answers in the dtype of its weight; always affine (``RuntimeError`` otherwise)."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: object
    ) -> None:
        _affine_only("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``; the result has its shape and the weight's dtype."""
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)
