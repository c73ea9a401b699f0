"""Gather what the traps of one file need to know of the other files."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from ampcompat.tools.check.source import Source

HOMES = ("fp16_utils.", "fp16_utils.fp16util.", "fp16_utils.fp16_optimizer.", "optimizers.", "contrib.optimizers.")
MAKES_HALF = ("network_to_half", "convert_network", "FP16Model", "FP16_Optimizer", "tofp16", "BN_convert_float")


@dataclass(frozen=True)
class Facts:
    """Hold what one file contributes.

    Attributes:
        uses_amp: It initializes amp or scales a loss.
        uses_fp16_utils: It makes a model half by hand: no level, and no lists that would cast anything back.
        initializes: It calls ``initialize``, with ``levels`` spelled out, or None.
        float_sigmoid: It registers ``torch.sigmoid`` to run in float32, or allows banned functions.
    """

    uses_amp: bool
    uses_fp16_utils: bool
    initializes: bool
    levels: frozenset[str] | None
    float_sigmoid: bool

    @classmethod
    def of(cls, source: Source) -> Facts:
        """The facts of a file."""
        starts = ("apex.amp.initialize", "apex.amp.scale_loss", "apex.amp.init", "apex.amp.handle.scale_loss")
        halves = tuple(f"apex.{home}{name}" for home in HOMES for name in MAKES_HALF)
        levels = source.opt_levels()
        return cls(
            bool(source.calls_to(*starts)),
            bool(source.calls_to(*halves)),
            bool(source.calls_to("apex.amp.initialize")),
            None if levels is None else frozenset(levels),
            _floats_sigmoid(source),
        )


class Repository:
    """Facts of all files together.

    Attributes:
        uses_amp: Some file initializes amp or scales a loss; without it no trap is one.
        levels: The opt_levels spelled out in ``initialize`` calls; None when one is computed (a command line option).
        float_sigmoid: Some file registers ``torch.sigmoid`` to run in float32, or allows banned functions.
    """

    def __init__(self, files: Iterable[Facts]) -> None:
        files = list(files)
        self.uses_amp = any(one.uses_amp for one in files)
        self.uses_fp16_utils = any(one.uses_fp16_utils for one in files)
        spelled = [one.levels for one in files if one.initializes]
        known = [levels for levels in spelled if levels is not None]
        self.levels = frozenset[str]().union(*known) if spelled and len(known) == len(spelled) else None
        self.float_sigmoid = self.uses_amp and any(one.float_sigmoid for one in files)

    @property
    def is_mixed(self) -> bool:
        """Whether anything runs in half by way of apex; without that nothing is a trap."""
        return self.uses_amp or self.uses_fp16_utils

    @property
    def casts(self) -> bool:
        """Whether operations may be cast one by one, as O1 and O4 do."""
        return self.uses_amp and self.may_run_at("O1", "O4")

    def may_run_at(self, *levels: str) -> bool:
        """Whether training may run at one of ``levels``: spelled out, or not known."""
        return self.levels is None or bool(self.levels & set(levels))

    def runs_at(self, *levels: str) -> bool:
        """Whether every level is spelled out and is one of ``levels``."""
        return self.levels is not None and self.levels <= set(levels)


def _floats_sigmoid(source: Source) -> bool:
    if any(keyword.arg == "allow_banned" for keyword in source.kind(ast.keyword)):
        return True
    for call in source.calls_to("apex.amp.register_float_function"):
        constants = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
        if not constants.isdisjoint({"sigmoid", "Sigmoid", "binary_cross_entropy"}):
            return True
    return False
