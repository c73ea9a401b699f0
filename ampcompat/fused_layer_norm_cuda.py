"""``fused_layer_norm_cuda``: the layer norm of apex's extension, which copies of ``FusedLayerNorm`` call, on torch's.

Means and inverse standard deviations have the shape ``(rows,)``, a row being what ``normalized_shape`` normalizes over,
and the dtype that torch's kernel gives them. No function takes part in autograd or autocast, as in apex.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ampcompat.amp.casts.contexts import casts_off

__all__ = ["backward", "backward_affine", "forward", "forward_affine"]


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of ``input``, the means of its rows, and the inverses of their standard deviations.

    Reproduces ``csrc/layer_norm_cuda.cpp: layer_norm_affine``.
    """
    return _forward(input, normalized_shape, weight, bias, eps)


def forward(input: Tensor, normalized_shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`forward_affine` does, without weight and bias."""
    return _forward(input, normalized_shape, None, None, eps)


def backward_affine(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, from what :func:`forward_affine` returned."""
    return _backward(grad_output, mean, invvar, input, normalized_shape, weight, bias)


def backward(
    grad_output: Tensor, mean: Tensor, invvar: Tensor, input: Tensor, normalized_shape: Sequence[int], eps: float
) -> Tensor:
    """Return the gradient of the input, from what :func:`forward` returned."""
    return _backward(grad_output, mean, invvar, input, normalized_shape, None, None)[0]


def _forward(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), casts_off(input.device.type):
        output, mean, invvar = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
    return output, mean.flatten(), invvar.flatten()


def _backward(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = list(normalized_shape)
    wanted = [True, weight is not None, bias is not None]
    with torch.no_grad(), casts_off(input.device.type):
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
            grad_output, input, shape, mean, invvar, weight, bias, wanted
        )
    return grads


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fused_layer_norm_cuda.{name} - ampcompat does not supply it - use ampcompat.normalization instead."
    )
