"""Where apex had the contributed ``FusedAdam``."""

from ampcompat.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
