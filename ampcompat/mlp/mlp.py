"""``MLP``: linear layers with an activation after each, as apex's fused one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ampcompat.amp.casts.contexts import casts_off

__all__ = ["MLP", "MlpFunction", "mlp_function"]

#: Each has the number that apex gave it.
ACTIVATIONS: Final = ("none", "relu", "sigmoid")
_RELU: Final = 1
_SIGMOID: Final = 2


def _activated(x: Tensor, activation: int) -> Tensor:
    if activation == _RELU:
        return F.relu(x)
    return x.sigmoid() if activation == _SIGMOID else x


def _before_activation(grad: Tensor, output: Tensor, activation: int) -> Tensor:
    """Turn the gradient of an activation's ``output`` into that of its input."""
    if activation == _RELU:
        return grad * (output > 0)
    return grad * output * (1 - output) if activation == _SIGMOID else grad


def _split(use_bias: int, args: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Tell input, weights and biases apart; without biases there is a None for each weight."""
    input, *params = args
    if not use_bias:
        return input, params, [None] * len(params)
    layers = len(params) // 2
    return input, params[:layers], params[layers:]


def _check(use_bias: int, activation: int, args: Sequence[Tensor]) -> None:
    if activation not in range(len(ACTIVATIONS)):
        raise TypeError(
            f"activation={activation!r} - it is a number here: 0 for none, 1 for relu, 2 for sigmoid - pass"
            " MLP.activation, or one of these."
        )
    params = len(args) - 1
    if params < 1 or (use_bias and params % 2):
        raise TypeError(
            f"mlp_function got {len(args)} tensors with bias={use_bias} - it takes the input, a weight for each layer,"
            " and with bias a bias for each - pass input, *weights, *biases."
        )


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Run the layers of an :class:`MLP` (``apex/mlp/mlp.py: mlp_function``).

    Args:
        bias: Whether there are biases.
        activation: 0 for none, 1 for ReLU, 2 for the sigmoid, after every layer.
        *args: The input (N, in), all weights (out, in), and with ``bias`` all biases (out,).

    Raises:
        TypeError: Another activation, or tensors that do not make layers.
    """
    _check(bias, activation, args)
    x, weights, biases = _split(bias, args)
    for weight, b in zip(weights, biases, strict=True):
        x = _activated(F.linear(x, weight, b), activation)
    return x


class MlpFunction(torch.autograd.Function):
    """The ``autograd.Function`` behind apex's :class:`MLP`, whose two methods scripts call from one of their own.

    NVIDIA's DLRM does, to choose what is cast under ``torch.autocast``. Neither method casts, as in apex.
    """

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *args: Tensor) -> Tensor:
        """Return what :func:`mlp_function` does; ``ctx`` gets what :meth:`backward` needs."""
        _check(bias, activation, args)
        x, weights, biases = _split(bias, args)
        outputs: list[Tensor] = []
        with torch.no_grad(), casts_off(x.device.type):
            for weight, b in zip(weights, biases, strict=True):
                x = _activated(F.linear(x, weight, b), activation)
                outputs.append(x)
        ctx.bias = bias
        ctx.activation = activation
        ctx.save_for_backward(*args, *outputs)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        """Return None twice, then the gradients of the input, of all weights, and of all biases if there are any."""
        layers = len(ctx.saved_tensors) // (3 if ctx.bias else 2)
        args = ctx.saved_tensors[:-layers]
        outputs = ctx.saved_tensors[-layers:]
        x, weights, _ = _split(ctx.bias, args)
        inputs = [x, *outputs[:-1]]
        grad = grad_o
        of_weights: list[Tensor] = []
        of_biases: list[Tensor] = []
        with torch.no_grad(), casts_off(grad.device.type):
            for weight, layer_input, output in zip(weights[::-1], inputs[::-1], outputs[::-1], strict=True):
                grad = _before_activation(grad, output, ctx.activation)
                rows = grad.flatten(0, -2)
                of_weights.append(rows.t() @ layer_input.flatten(0, -2))
                of_biases.append(rows.sum(0))
                grad = grad @ weight
        params = [*of_weights[::-1], *of_biases[::-1]] if ctx.bias else of_weights[::-1]
        return (None, None, grad, *params)


class MLP(nn.Module):
    """Run linear layers of the given sizes, each followed by the activation (the last one too).

    Reproduces ``apex/mlp/mlp.py: MLP``, its parameters' names (``weight_0``, ``bias_0``, ...) included.

    Args:
        mlp_sizes: Sizes of the input and of every layer, such as ``[1024, 512, 256]``.
        bias: Whether the layers have biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``; a bool is taken for ``relu``, whose place it took.
        relu: What apex had before ``activation``: True for ``"relu"``, False for ``"none"``.

    Raises:
        TypeError: Another activation, or both arguments.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str | bool = "relu", relu: bool | None = None
    ) -> None:
        if relu is not None and activation != "relu":
            raise TypeError(
                f"activation={activation!r} and relu={relu} - these are two names of one choice, not both - drop relu."
            )
        chosen = activation if relu is None else relu
        if isinstance(chosen, bool):
            chosen = "relu" if chosen else "none"
        if chosen not in ACTIVATIONS:
            raise TypeError(f"activation={activation!r} - apex's MLP knows none, relu and sigmoid - pass one of them.")
        super().__init__()
        self.mlp_sizes = list(mlp_sizes)
        # Numbers, as mlp_function takes them. In models that apex has saved they are numbers, too.
        self.bias = 1 if bias else 0
        self.activation = ACTIVATIONS.index(chosen)
        self.num_layers = len(self.mlp_sizes) - 1
        for i, (fan_in, fan_out) in enumerate(pairwise(self.mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(fan_out, fan_in)))
            self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(fan_out)) if bias else None)
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """Return the weights, layer by layer."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """Return the biases, layer by layer; none without ``bias``."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw normal weights of deviation sqrt(2 / (fan_in + fan_out)), biases of sqrt(1 / fan_out)."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, (2.0 / sum(weight.shape)) ** 0.5)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, (1.0 / bias.numel()) ** 0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, sizes[0]) to (N, sizes[-1])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return sizes, bias and activation, as apex printed them."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
