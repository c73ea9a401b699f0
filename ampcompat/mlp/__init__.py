"""``MLP``: linear layers with an activation after each."""

from ampcompat.mlp.mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp_function"]
