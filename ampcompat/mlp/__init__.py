"""``MLP``: linear layers with an activation after each."""

from ampcompat.mlp.mlp import MLP

__all__ = ["MLP"]
