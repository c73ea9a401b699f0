"""``fused_layer_norm_cuda``: the norms of apex's extension, which copies of its ``fused_layer_norm.py`` call.

Functions and parameters are those that ``csrc/layer_norm_cuda.cpp`` binds. A row is what ``normalized_shape``, the last
dimensions of the input, normalizes over. Means and inverse standard deviations (for RMS norms: inverse root mean
squares) have the shape ``(rows,)``, and are float32 for half inputs. All is computed in float32 at least and rounded
once. No function takes part in autograd or autocast, as in apex.

With ``memory_efficient`` a backward function gets what the forward function returned, in the place of the input, and
recovers the normalized input from it: ``(output - beta) / gamma``. That is as exact as the dtype of the output. Where
an element of ``gamma`` is 0 nothing can be recovered: the gradients there are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor

from ampcompat.amp.casts.contexts import casts_off

__all__ = ["backward", "backward_affine", "forward", "forward_affine", "forward_affine_mixed_dtypes"]
__all__ += ["rms_backward", "rms_backward_affine", "rms_forward", "rms_forward_affine"]
__all__ += ["rms_forward_affine_mixed_dtypes"]


# -- layer norm --------------------------------------------------------------------------------------------------------
def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of ``input`` in its dtype, the means of rows, and their inverse standard deviations."""
    return _layer_norm(input, normalized_shape, gamma, beta, epsilon, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`forward_affine` does, the layer norm in the dtype of ``gamma``."""
    return _layer_norm(input, normalized_shape, gamma, beta, epsilon, gamma.dtype)


def forward(input: Tensor, normalized_shape: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`forward_affine` does, without ``gamma`` and ``beta``."""
    return _layer_norm(input, normalized_shape, None, None, epsilon, input.dtype)


def backward_affine(
    dout: Tensor,
    mean_: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, ``gamma`` and ``beta``.

    Args:
        dout: Gradient of the layer norm.
        mean_: Means of rows; None with ``memory_efficient``.
        invvar: Inverse standard deviations of rows.
        input_or_output: The input; with ``memory_efficient`` the layer norm of it.
        normalized_shape: As in forward.
        gamma: As in forward.
        beta: As in forward.
        epsilon: Not needed: it is in ``invvar``.
        memory_efficient: Whether ``input_or_output`` is the output. Older callers do not pass it.

    Raises:
        ValueError: ``mean_`` is None without ``memory_efficient``.
    """
    shape = _checked(input_or_output, normalized_shape)
    with torch.no_grad(), casts_off(dout.device.type):
        grad, values, weight, bias = _wide(dout, input_or_output, gamma, beta)
        if memory_efficient:
            centred = values - bias
            normalized = centred / weight
            grad_input = _grad_input(grad * weight, normalized, grad * centred, invvar, shape, is_centred=True)
            grad_gamma = _sum_of_rows(grad * normalized, shape)
            grad_beta = _sum_of_rows(grad, shape)
        else:
            grad_input, grad_gamma, grad_beta = _native_backward(grad, mean_, invvar, values, shape, weight, bias)
    return grad_input.to(input_or_output.dtype), grad_gamma.to(gamma.dtype), grad_beta.to(beta.dtype)


def backward(
    dout: Tensor,
    mean_: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    epsilon: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input, as :func:`backward_affine`, without ``gamma`` and ``beta``.

    Raises:
        ValueError: ``mean_`` is None without ``memory_efficient``.
    """
    shape = _checked(input_or_output, normalized_shape)
    with torch.no_grad(), casts_off(dout.device.type):
        grad, values = _wide(dout, input_or_output)
        if memory_efficient:
            grad_input = _grad_input(grad, values, grad * values, invvar, shape, is_centred=True)
        else:
            grad_input = _native_backward(grad, mean_, invvar, values, shape, None, None)[0]
    return grad_input.to(input_or_output.dtype)


# -- RMS norm ----------------------------------------------------------------------------------------------------------
def rms_forward_affine(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``input`` in its dtype, and the inverse root mean squares of rows."""
    return _rms_norm(input, normalized_shape, gamma, epsilon, input.dtype)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return what :func:`rms_forward_affine` does, the RMS norm in the dtype of ``gamma``."""
    return _rms_norm(input, normalized_shape, gamma, epsilon, gamma.dtype)


def rms_forward(input: Tensor, normalized_shape: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """Return what :func:`rms_forward_affine` does, without ``gamma``."""
    return _rms_norm(input, normalized_shape, None, epsilon, input.dtype)


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    gamma: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of ``gamma``.

    Args:
        dout: Gradient of the RMS norm.
        invvar: Inverse root mean squares of rows.
        input_or_output: The input; with ``memory_efficient`` the RMS norm of it.
        normalized_shape: As in forward.
        gamma: As in forward.
        epsilon: Not needed: it is in ``invvar``.
        memory_efficient: Whether ``input_or_output`` is the output.
    """
    shape = _checked(input_or_output, normalized_shape)
    with torch.no_grad(), casts_off(dout.device.type):
        grad, values, weight = _wide(dout, input_or_output, gamma)
        weighted = grad * weight
        if memory_efficient:
            normalized = values / weight
            products = grad * values
        else:
            normalized = values * _for_rows(invvar, values, shape)
            products = weighted * normalized
        grad_input = _grad_input(weighted, normalized, products, invvar, shape, is_centred=False)
        grad_gamma = _sum_of_rows(grad * normalized, shape)
    return grad_input.to(input_or_output.dtype), grad_gamma.to(gamma.dtype)


def rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Sequence[int],
    epsilon: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input, as :func:`rms_backward_affine`, without ``gamma``."""
    shape = _checked(input_or_output, normalized_shape)
    with torch.no_grad(), casts_off(dout.device.type):
        grad, values = _wide(dout, input_or_output)
        normalized = values if memory_efficient else values * _for_rows(invvar, values, shape)
        grad_input = _grad_input(grad, normalized, grad * normalized, invvar, shape, is_centred=False)
    return grad_input.to(input_or_output.dtype)


# -- what they share ---------------------------------------------------------------------------------------------------
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _checked(input, normalized_shape)
    with torch.no_grad(), casts_off(input.device.type):
        if gamma is None or beta is None:
            (values,) = _wide(input)
            output, mean, invvar = torch.native_layer_norm(values, shape, None, None, epsilon)
        else:
            values, weight, bias = _wide(input, gamma, beta)
            output, mean, invvar = torch.native_layer_norm(values, shape, weight, bias, epsilon)
    return output.to(dtype), mean.flatten(), invvar.flatten()


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], gamma: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = _checked(input, normalized_shape)
    with torch.no_grad(), casts_off(input.device.type):
        if gamma is None:
            (values,) = _wide(input)
        else:
            values, weight = _wide(input, gamma)
        invvar = (values.square().mean(_dims(shape), keepdim=True) + epsilon).rsqrt()
        output = values * invvar
        if gamma is not None:
            output = output * weight
    return output.to(dtype), invvar.flatten()


def _native_backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    shape: list[int],
    gamma: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if mean is None:
        raise ValueError(
            "fused_layer_norm_cuda got mean_=None without memory_efficient - from an input, gradients need the means of"
            " its rows - pass what forward returned; or the output, and memory_efficient=True."
        )
    wanted = [True, gamma is not None, beta is not None]
    stats = (_for_rows(mean, input, shape), _for_rows(invvar, input, shape))
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        dout, input, shape, *stats, gamma, beta, wanted
    )
    return grads


def _grad_input(
    weighted: Tensor, normalized: Tensor, products: Tensor, invvar: Tensor, shape: list[int], is_centred: bool
) -> Tensor:
    """Return the gradient of the input of a norm, from what it has made of the input.

    Args:
        weighted: Gradient of the output, times ``gamma``.
        normalized: The input less its mean, divided by its deviation.
        products: ``weighted * normalized``, exact where ``gamma`` is 0 too.
        invvar: One over the deviation, a number a row.
        shape: The normalized shape.
        is_centred: Whether the norm takes the mean off its input.
    """
    dims = _dims(shape)
    inner = weighted - normalized * products.mean(dims, keepdim=True)
    if is_centred:
        inner = inner - weighted.mean(dims, keepdim=True)
    return inner * _for_rows(invvar, weighted, shape)


def _sum_of_rows(values: Tensor, shape: list[int]) -> Tensor:
    return values.reshape(-1, *shape).sum(0)


def _for_rows(numbers: Tensor, input: Tensor, shape: list[int]) -> Tensor:
    """One number a row, shaped to be broadcast over ``input``."""
    rows = input.shape[: input.dim() - len(shape)]
    return numbers.reshape(*rows, *[1] * len(shape))


def _dims(shape: list[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return ``tensors`` in one dtype, float32 or wider."""
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    return [tensor.to(dtype) for tensor in tensors]


def _checked(input: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    shape = list(normalized_shape)
    if not shape or list(input.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"fused_layer_norm_cuda got normalized_shape={shape} and a tensor of shape {list(input.shape)} - its last"
            " dimensions must be the normalized shape - pass them."
        )
    return shape


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fused_layer_norm_cuda.{name} - ampcompat does not supply it - use ampcompat.normalization instead."
    )
