"""``apex.optimizers``: apex's optimizers on torch's fused and foreach kernels.

All are ``torch.optim.Optimizer`` subclasses with apex's signatures, defaults and state names, usable at every
opt_level. ``FP16_Optimizer``, which lived here until 2019, is imported when it is asked for.
"""

from typing import TYPE_CHECKING

from ampcompat.optimizers.fused_adagrad import FusedAdagrad
from ampcompat.optimizers.fused_adam import FusedAdam
from ampcompat.optimizers.fused_lamb import FusedLAMB
from ampcompat.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from ampcompat.optimizers.fused_novograd import FusedNovoGrad
from ampcompat.optimizers.fused_sgd import FusedSGD

if TYPE_CHECKING:
    from ampcompat.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


def __getattr__(name: str) -> object:
    if name == "FP16_Optimizer":
        from ampcompat.optimizers.fp16_optimizer import FP16_Optimizer

        return FP16_Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
