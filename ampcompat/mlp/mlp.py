"""``MLP``: linear layers with an activation after each, as apex's fused one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MLP"]


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
        if chosen not in ("none", "relu", "sigmoid"):
            raise TypeError(f"activation={activation!r} - apex's MLP knows none, relu and sigmoid - pass one of them.")
        super().__init__()
        self.mlp_sizes = list(mlp_sizes)
        self.bias = bias
        self.activation = chosen
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
        for i in range(self.num_layers):
            input = F.linear(input, getattr(self, f"weight_{i}"), getattr(self, f"bias_{i}"))
            if self.activation == "relu":
                input = F.relu(input)
            elif self.activation == "sigmoid":
                input = input.sigmoid()
        return input

    def extra_repr(self) -> str:
        """Return sizes, bias and activation, as apex printed them."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
