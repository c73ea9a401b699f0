"""The names of ``ampcompat.optimizers``; the distributed optimizers name their replacement."""

import importlib
from typing import Any

from ampcompat._replacements import explain_missing_submodules, refuse

explain_missing_submodules()


def __getattr__(name: str) -> Any:
    if name not in ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"):
        refuse(__name__, name)
    return getattr(importlib.import_module("ampcompat.optimizers"), name)
