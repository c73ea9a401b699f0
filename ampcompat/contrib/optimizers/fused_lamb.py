"""Where apex had the contributed ``FusedLAMB``."""

from ampcompat.optimizers.fused_lamb import FusedLAMB

__all__ = ["FusedLAMB"]
