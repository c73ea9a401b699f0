"""apex's optimizers from before amp; the distributed ones name their replacement."""

import importlib
from typing import TYPE_CHECKING, Final

from ampcompat._replacements import explain_missing_submodules, refuse

if TYPE_CHECKING:
    from ampcompat.contrib.optimizers.fp16_optimizer import FP16_Optimizer as FP16_Optimizer
    from ampcompat.contrib.optimizers.fused_adam import FusedAdam as FusedAdam
    from ampcompat.contrib.optimizers.fused_lamb import FusedLAMB as FusedLAMB
    from ampcompat.contrib.optimizers.fused_sgd import FusedSGD as FusedSGD

explain_missing_submodules()

_HOMES: Final = {
    "FP16_Optimizer": "fp16_optimizer",
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_lamb",
    "FusedSGD": "fused_sgd",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        refuse(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
