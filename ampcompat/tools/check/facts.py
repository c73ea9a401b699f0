"""What is known of one file by itself, whatever other files are read with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ampcompat.tools.check.mistakes import Suspect
from ampcompat.tools.check.programs import Import, imports
from ampcompat.tools.check.settings import INITIALIZE, Initialization, initializations
from ampcompat.tools.check.source import SCALE_LOSS, Source
from ampcompat.tools.check.traps import TRAPS
from ampcompat.tools.check.values import Values, options

HOMES = ("fp16_utils.", "fp16_utils.fp16util.", "fp16_utils.fp16_optimizer.", "optimizers.", "contrib.optimizers.")
MAKES_HALF = ("network_to_half", "convert_network", "FP16Model", "FP16_Optimizer", "tofp16", "BN_convert_float")


@dataclass(frozen=True)
class Facts:
    """What the judgement of this file, and of those that an import ties to it, needs to know.

    Attributes:
        path: Its path in the report.
        imports: What it imports.
        initializations: Its calls of ``initialize``.
        options: Options of the command line that it declares.
        uses_amp: It initializes amp or scales a loss.
        scales: It scales a loss.
        is_half_by_hand: It makes a model half without ``initialize``: no level, and no lists that cast anything back.
        float_sigmoid: It registers ``torch.sigmoid`` to run in float32, or allows banned functions.
        suspects: What its traps have found.
    """

    path: str = ""
    imports: frozenset[Import] = frozenset()
    initializations: tuple[Initialization, ...] = ()
    options: Mapping[str, Values] = field(default_factory=dict)
    uses_amp: bool = False
    scales: bool = False
    is_half_by_hand: bool = False
    float_sigmoid: bool = False
    suspects: tuple[Suspect, ...] = ()

    @classmethod
    def of(cls, source: Source) -> Facts:
        """The facts of a file."""
        return cls(
            path=source.path,
            imports=frozenset(imports(source)),
            initializations=tuple(dict.fromkeys(initializations(source).values())),
            options=options(source),
            uses_amp=bool(source.calls_to(*INITIALIZE, *SCALE_LOSS, "apex.amp.init")),
            scales=bool(source.calls_to(*SCALE_LOSS)),
            is_half_by_hand=bool(source.calls_to(*(f"apex.{home}{name}" for home in HOMES for name in MAKES_HALF))),
            float_sigmoid=_floats_sigmoid(source),
            suspects=tuple(_suspects(source)),
        )

    @property
    def is_mixed(self) -> bool:
        """Whether anything runs in half by way of apex."""
        return self.uses_amp or self.is_half_by_hand


def _suspects(source: Source) -> Iterator[Suspect]:
    for trap in TRAPS:
        for mistake in trap(source):
            yield Suspect(source.finding(mistake.node, "trap", trap.__name__, "", mistake.note), mistake.grade)


def _floats_sigmoid(source: Source) -> bool:
    if any(keyword.arg == "allow_banned" for keyword in source.kind(ast.keyword)):
        return True
    for call in source.calls_to("apex.amp.register_float_function"):
        constants = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
        if not constants.isdisjoint({"sigmoid", "Sigmoid", "binary_cross_entropy"}):
            return True
    return False
