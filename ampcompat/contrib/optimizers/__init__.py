"""The names of ``ampcompat.optimizers``; the distributed optimizers name their replacement."""

import importlib
from typing import TYPE_CHECKING

from ampcompat._replacements import explain_missing_submodules, refuse

if TYPE_CHECKING:
    from ampcompat.optimizers import FP16_Optimizer as FP16_Optimizer
    from ampcompat.optimizers import FusedAdam as FusedAdam
    from ampcompat.optimizers import FusedLAMB as FusedLAMB
    from ampcompat.optimizers import FusedSGD as FusedSGD

explain_missing_submodules()


def __getattr__(name: str) -> object:
    if name not in ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"):
        refuse(__name__, name)
    return getattr(importlib.import_module("ampcompat.optimizers"), name)
