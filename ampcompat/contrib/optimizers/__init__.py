"""The names of ``ampcompat.optimizers``; the distributed optimizers name their replacement."""

from typing import Any

from ampcompat._replacements import explain_missing_submodules, refuse

explain_missing_submodules()


def __getattr__(name: str) -> Any:
    if name in ("FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"):
        import ampcompat.optimizers as supplied

        return getattr(supplied, name)
    refuse(__name__, name)
