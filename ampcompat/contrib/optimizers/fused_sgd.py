"""Where apex had the contributed ``FusedSGD``."""

from ampcompat.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedSGD"]
