"""Where apex had ``FP16_Optimizer``."""

from ampcompat.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
