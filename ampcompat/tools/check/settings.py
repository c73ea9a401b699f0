"""Calls of ``amp.initialize``, and the settings in which the code that they govern may run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampcompat.tools.check.source import Source, argument, once
from ampcompat.tools.check.values import UNKNOWN, Values, values_of
from ampcompat.tools.level_table import LEVELS, Level

INITIALIZE = ("apex.amp.initialize", "apex.amp.frontend.initialize")
DEFAULT_LEVEL = "O1"
DEFAULT = Values.only(DEFAULT_LEVEL)
NOT_GIVEN = Values.only(None)
#: The positions of the arguments that traps ask for.
POSITIONS = {"opt_level": 3, "patch_torch_functions": 5, "master_weights": 7, "loss_scale": 8}


@dataclass(frozen=True)
class Setting:
    """What one run of some code has in force; None stands for what is not known.

    Attributes:
        weights: The dtype that weights are cast to; "" for none.
        functions: The dtype that functions are cast to; "" for none.
        masters: Whether the optimizer steps float32 masters.
        is_scaled: Whether the loss is multiplied by a scale.
        float_sigmoid: Whether ``torch.sigmoid`` is registered to run in float32, or banned functions are allowed.
        scales_elsewhere: Whether a file that an import ties to the code scales losses.
    """

    weights: str
    functions: str
    masters: bool | None
    is_scaled: bool | None
    float_sigmoid: bool = False
    scales_elsewhere: bool = False


@dataclass(frozen=True)
class Initialization:
    """What one call of ``amp.initialize`` is given, as far as traps ask for it; each default is apex's.

    Attributes:
        is_off: Whether it says ``enabled=False``.
    """

    opt_level: Values = DEFAULT
    patch_torch_functions: Values = NOT_GIVEN
    master_weights: Values = NOT_GIVEN
    loss_scale: Values = NOT_GIVEN
    is_off: bool = False

    @classmethod
    def of(cls, source: Source, call: ast.Call) -> Initialization:
        """Read a call; what it unpacks (``**options``) may be anything."""
        unpacks = any(keyword.arg is None for keyword in call.keywords)
        unpacks = unpacks or any(isinstance(given, ast.Starred) for given in call.args)
        if unpacks and argument(call, POSITIONS["opt_level"], "opt_level") is None:
            return ANY_LEVEL
        found: dict[str, Any] = {}
        for name, position in POSITIONS.items():
            given = argument(call, position, name)
            if given is not None:
                found[name] = values_of(source, given)
            elif unpacks:
                found[name] = Values()
        enabled = argument(call, 2, "enabled")
        is_off = isinstance(enabled, ast.Constant) and enabled.value in (False, 0)
        return cls(**found, is_off=is_off)

    def looked_up(self, options: Mapping[str, Values]) -> Initialization:
        """The same call with the values of the command line's options in the place of their names."""
        known: dict[str, Any] = {name: getattr(self, name).looked_up(options) for name in POSITIONS}
        return replace(self, **known)

    @property
    def usual_level(self) -> str | None:
        """The level at which it runs, unless a command line says otherwise; None where that is not known."""
        level = self.opt_level.usual
        return level if isinstance(level, str) and level in LEVELS else None

    @property
    def is_literal(self) -> bool:
        """Whether it can run at no other level."""
        level = self.opt_level
        return self.usual_level is not None and not level.is_open and not level.others

    def levels(self) -> list[str]:
        """Every level at which it may run; all where no level is named."""
        level = self.opt_level
        named = [name for name in LEVELS if name == level.usual or name in level.others]
        return list(LEVELS) if level.is_open or not named else named

    def at(self, name: str) -> Setting:
        """The setting at one level, with the options that the call overrides."""
        if self.is_off:
            return Setting(weights="", functions="", masters=False, is_scaled=False)
        level = LEVELS[name]
        patches = self.patch_torch_functions.usual
        return Setting(
            weights=level.weights,
            functions="" if patches is False else level.functions,
            masters=self._masters(level),
            is_scaled=self._is_scaled(level),
        )

    def _masters(self, level: Level) -> bool | None:
        given = self.master_weights.usual
        if isinstance(given, bool):
            return given
        is_uncertain = given is not None and level.masters
        return None if is_uncertain else level.masters

    def _is_scaled(self, level: Level) -> bool | None:
        given = self.loss_scale.usual
        if given is None:
            return _is_scale(level.loss_scale)
        if given is not UNKNOWN:
            return _is_scale(given)
        return None if _is_scale(level.loss_scale) else False


def _is_scale(value: object) -> bool:
    """Whether a loss scale, as ``initialize`` takes it, may be another one than 1."""
    return str(value) not in ("1", "1.0")


#: What is in force where no call of ``initialize`` is known: any level, with the options of its row.
ANY_LEVEL = Initialization(opt_level=Values())
#: A model that ``fp16_utils`` make half.
HALF_BY_HAND = Setting(weights="float16", functions="", masters=None, is_scaled=None)


@once
def initializations(source: Source) -> dict[ast.Call, Initialization]:
    """The calls of ``initialize`` in a file."""
    return {call: Initialization.of(source, call) for call in source.calls_to(*INITIALIZE)}
