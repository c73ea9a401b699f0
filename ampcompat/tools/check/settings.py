"""Calls of ``amp.initialize``: which code each governs, and in which settings that code may run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ampcompat.tools.check.levels import LEVELS, Level
from ampcompat.tools.check.source import SCOPES, Source, argument, once
from ampcompat.tools.check.values import UNKNOWN, Values, values_of

INITIALIZE = ("apex.amp.initialize", "apex.amp.frontend.initialize")
DEFAULT_LEVEL = "O1"
#: Arguments that traps ask for, with their positions and defaults.
ARGUMENTS: dict[str, tuple[int, object]] = {
    "opt_level": (3, DEFAULT_LEVEL),
    "patch_torch_functions": (5, None),
    "master_weights": (7, None),
    "loss_scale": (8, None),
    "num_losses": (10, 1),
}


@dataclass(frozen=True)
class Setting:
    """What one run of some code has in force; None stands for what is not known.

    Attributes:
        level: The name of the level; "" for a model that is half by hand.
        weights: The dtype that weights are cast to; "" for none.
        functions: The dtype that functions are cast to; "" for none.
        masters: Whether the optimizer steps float32 masters.
        is_scaled: Whether the loss is multiplied by a scale.
        num_losses: The number of losses.
        float_sigmoid: Whether ``torch.sigmoid`` is registered to run in float32, or banned functions are allowed.
    """

    level: str
    weights: str
    functions: str
    masters: bool | None
    is_scaled: bool | None
    num_losses: int | None = None
    float_sigmoid: bool = False


@dataclass(frozen=True)
class Initialization:
    """One call of ``amp.initialize``.

    Attributes:
        arguments: What it is given for each of :data:`ARGUMENTS`.
        is_off: Whether it says ``enabled=False``.
    """

    arguments: Mapping[str, Values] = field(hash=False)
    is_off: bool = False

    @classmethod
    def of(cls, source: Source, call: ast.Call) -> Initialization:
        """Read a call; what it unpacks (``**options``) may be anything."""
        unpacks = any(keyword.arg is None for keyword in call.keywords)
        unpacks = unpacks or any(isinstance(given, ast.Starred) for given in call.args)
        found = {}
        for name, (position, default) in ARGUMENTS.items():
            given = argument(call, position, name)
            if given is not None:
                found[name] = values_of(source, given)
            else:
                found[name] = Values() if unpacks else Values.only(default)
        enabled = argument(call, 2, "enabled")
        return cls(found, isinstance(enabled, ast.Constant) and enabled.value in (False, 0))

    def looked_up(self, options: Mapping[str, Values]) -> Initialization:
        """The same call with the values of the command line's options in the place of their names."""
        return replace(self, arguments={name: values.looked_up(options) for name, values in self.arguments.items()})

    @property
    def usual_level(self) -> str | None:
        """The level at which it runs, unless a command line says otherwise; None where that is not known."""
        level = self.arguments["opt_level"].usual
        return level if isinstance(level, str) and level in LEVELS else None

    @property
    def is_literal(self) -> bool:
        """Whether it can run at no other level."""
        level = self.arguments["opt_level"]
        return self.usual_level is not None and not level.is_open and not level.others

    def levels(self) -> list[str]:
        """Every level at which it may run; all where no level is named."""
        level = self.arguments["opt_level"]
        named = [name for name in LEVELS if name == level.usual or name in level.others]
        return list(LEVELS) if level.is_open or not named else named

    def at(self, name: str) -> Setting:
        """The setting at one level, with the options that the call overrides."""
        if self.is_off:
            return Setting(name, weights="", functions="", masters=False, is_scaled=False)
        level = LEVELS[name]
        patches = self.arguments["patch_torch_functions"].usual
        num_losses = self.arguments["num_losses"].usual
        return Setting(
            level=name,
            weights=level.weights,
            functions="" if patches is False else level.functions,
            masters=self._masters(level),
            is_scaled=self._is_scaled(level),
            num_losses=num_losses if isinstance(num_losses, int) else None,
        )

    def _masters(self, level: Level) -> bool | None:
        given = self.arguments["master_weights"].usual
        if given is None:
            return level.masters
        return given if isinstance(given, bool) else None

    def _is_scaled(self, level: Level) -> bool | None:
        given = self.arguments["loss_scale"].usual
        if given is UNKNOWN:
            return None
        scale = level.loss_scale if given is None else given
        return str(scale) not in ("1", "1.0")


#: What is in force where no call of ``initialize`` is known: any level, with the options of its row.
ANY_LEVEL = Initialization(
    {
        **{name: Values.only(default) for name, (_, default) in ARGUMENTS.items()},
        "opt_level": Values(),
        "num_losses": Values(),
    }
)
#: A model that ``fp16_utils`` make half.
HALF_BY_HAND = Setting("", weights="float16", functions="", masters=None, is_scaled=None)


@once
def initializations(source: Source) -> dict[ast.Call, Initialization]:
    """The calls of ``initialize`` in a file."""
    return {call: Initialization.of(source, call) for call in source.calls_to(*INITIALIZE)}


def governing(source: Source, node: ast.AST) -> tuple[Initialization, ...]:
    """The calls of ``initialize`` that govern a node: in its function, or else in its class, or else in its file."""
    calls = initializations(source)
    for part in _parts_around(source, node):
        within = tuple(initialization for call, initialization in calls.items() if part in source.ancestors(call))
        if within:
            return within
    return tuple(calls.values())


def _parts_around(source: Source, node: ast.AST) -> Iterator[ast.AST]:
    """The functions and classes around a node, the innermost first."""
    for part in source.ancestors(node):
        if isinstance(part, (*SCOPES, ast.ClassDef)):
            yield part
