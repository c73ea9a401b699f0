"""``MLP``: linear layers with an activation after each, as apex's fused one."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MLP"]


class MLP(nn.Module):
    """Linear layers of the given sizes, each followed by the activation (the last one too, as in apex).

    Args:
        mlp_sizes: Sizes of the input and of every layer, such as ``[1024, 512, 256]``.
        bias: Whether the layers have biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``.

    Raises:
        TypeError: Another activation.
    """

    def __init__(self, mlp_sizes: list[int], bias: bool = True, activation: str = "relu") -> None:
        if activation not in ("none", "relu", "sigmoid"):
            raise TypeError(f"activation={activation!r} - apex's MLP knows none, relu and sigmoid - pass one of them.")
        super().__init__()
        self.mlp_sizes, self.activation, self.num_layers = list(mlp_sizes), activation, len(mlp_sizes) - 1
        # apex's state_dict keys: weight_0, bias_0, ...
        for i, (fan_in, fan_out) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(fan_out, fan_in)))
            self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(fan_out)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation sqrt(2 / (fan_in + fan_out)), biases of sqrt(1 / fan_out)."""
        for p in self.parameters():
            nn.init.normal_(p, 0.0, (2.0 / sum(p.shape)) ** 0.5 if p.dim() == 2 else (1.0 / p.numel()) ** 0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, sizes[0]) to (N, sizes[-1])."""
        for i in range(self.num_layers):
            input = F.linear(input, getattr(self, f"weight_{i}"), getattr(self, f"bias_{i}"))
            if self.activation != "none":
                input = F.relu(input) if self.activation == "relu" else input.sigmoid()
        return input
