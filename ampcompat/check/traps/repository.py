"""What the traps of one file need to know of the other files."""

from __future__ import annotations

import ast

from ampcompat.check.source import Source


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
        levels: set[str] | None = set()
        for source in sources:
            if source.calls_to("apex.amp.initialize"):
                spelled = source.opt_levels()
                levels = None if levels is None or spelled is None else levels | spelled
        self.levels = levels or None
        self.float_sigmoid = self.uses_amp and any(map(_floats_sigmoid, sources))

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
