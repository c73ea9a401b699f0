"""What the traps of one file need to know of the other files."""

from __future__ import annotations

import ast

from ampcompat.check.source import Source

HOMES = ("fp16_utils.", "fp16_utils.fp16util.", "fp16_utils.fp16_optimizer.", "optimizers.", "contrib.optimizers.")
MAKES_HALF = ("network_to_half", "convert_network", "FP16Model", "FP16_Optimizer", "tofp16", "BN_convert_float")


class Repository:
    """Facts of all files together.

    Attributes:
        uses_amp: Some file initializes amp or scales a loss; without it no trap is one.
        levels: The opt_levels spelled out in ``initialize`` calls; None when one is computed (a command line option).
        float_sigmoid: Some file registers ``torch.sigmoid`` to run in float32, or allows banned functions.
    """

    def __init__(self, sources: list[Source]) -> None:
        starts = ("apex.amp.initialize", "apex.amp.scale_loss", "apex.amp.init", "apex.amp.handle.scale_loss")
        self.uses_amp = any(source.calls_to(*starts) for source in sources)
        halves = tuple(f"apex.{home}{name}" for home in HOMES for name in MAKES_HALF)
        # Models made half by hand: no level, and no lists that would cast anything back.
        self.uses_fp16_utils = any(source.calls_to(*halves) for source in sources)
        levels: set[str] | None = set()
        for source in sources:
            if source.calls_to("apex.amp.initialize"):
                spelled = source.opt_levels()
                levels = None if levels is None or spelled is None else levels | spelled
        self.levels = levels or None
        self.float_sigmoid = self.uses_amp and any(map(_floats_sigmoid, sources))

    @property
    def is_mixed(self) -> bool:
        """Whether anything runs in half by way of apex; without that nothing is a trap."""
        return self.uses_amp or self.uses_fp16_utils

    @property
    def casts(self) -> bool:
        """Whether operations may be cast one by one, as O1 and O4 do."""
        return self.uses_amp and self.may_run_at("O1", "O4")

    @property
    def keeps_half(self) -> bool:
        """Whether models are half wherever amp is used."""
        return (self.uses_amp and self.runs_at("O2", "O3", "O5")) or (self.uses_fp16_utils and not self.uses_amp)

    def may_run_at(self, *levels: str) -> bool:
        """Whether training may run at one of ``levels``: spelled out, or not known."""
        return self.levels is None or bool(self.levels & set(levels))

    def runs_at(self, *levels: str) -> bool:
        """Whether every level is spelled out and is one of ``levels``."""
        return self.levels is not None and self.levels <= set(levels)


def _floats_sigmoid(source: Source) -> bool:
    for call in source.calls:
        if any(k.arg == "allow_banned" for k in call.keywords):
            return True
        constants = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if source.apex(call.func) == "apex.amp.register_float_function" and set(constants) & {
            "sigmoid",
            "Sigmoid",
            "binary_cross_entropy",
        }:
            return True
    return False
