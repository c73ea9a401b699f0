"""A mistake that a trap has found, and what becomes of it: an error, a warning, or nothing, by the levels in force."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.settings import ANY_LEVEL, HALF_BY_HAND, Initialization, Setting

#: How bad a mistake is in a setting: ``ERROR``, ``WARNING`` where the code does not prove it, None for not at all.
Grade: TypeAlias = Callable[[Setting], str | None]


@dataclass(frozen=True)
class Mistake:
    """What a trap finds.

    Attributes:
        node: Where it is.
        note: What goes wrong, and the fix.
        grade: How bad it is in a setting, or in every one.
    """

    node: ast.AST
    note: str
    grade: Grade | str


@dataclass(frozen=True)
class Surroundings:
    """What is known of the runs of the code around a suspect.

    Attributes:
        calls: The calls of ``initialize`` that govern it; empty if none is known.
        float_sigmoid: As of :class:`Setting`.
        scales_elsewhere: As of :class:`Setting`.
        is_half_by_hand: Whether its program makes a model half without ``initialize``.
    """

    calls: Sequence[Initialization]
    float_sigmoid: bool = False
    scales_elsewhere: bool = False
    is_half_by_hand: bool = False


@dataclass(frozen=True)
class Suspect:
    """A mistake of one file, before it is known in which settings that file runs.

    Attributes:
        finding: What is reported of it, still without a level.
        grade: As of :class:`Mistake`.
    """

    finding: Finding
    grade: Grade | str

    def judged(self, around: Surroundings) -> Finding | None:
        """The finding that it comes to; None where it is no mistake."""
        if isinstance(self.grade, str):
            return replace(self.finding, level=self.grade)
        if not around.calls and around.is_half_by_hand:
            level = self.grade(HALF_BY_HAND)
            return None if level is None else replace(self.finding, level=level)
        return self._as_error(self.grade, around) or self._as_warning(self.grade, around)

    def _as_error(self, grade: Grade, around: Surroundings) -> Finding | None:
        """An error, if it is one at the usual level of each of the calls."""
        names = []
        for call in around.calls:
            name = call.usual_level
            if name is None or grade(_setting(call, name, around)) != ERROR:
                return None
            names.append(name)
        if not names:
            return None
        by_default = "" if all(call.is_literal for call in around.calls) else ", the default"
        note = f"at {_listed(names, 'and')}{by_default}: {self.finding.note}"
        return replace(self.finding, level=ERROR, note=note)

    def _as_warning(self, grade: Grade, around: Surroundings) -> Finding | None:
        """A warning that names the levels at which it is an error, or at which it may be one."""
        names: dict[str | None, list[str]] = {ERROR: [], WARNING: [], None: []}
        for call in around.calls or [ANY_LEVEL]:
            for name in call.levels():
                names[grade(_setting(call, name, around))].append(name)
        worst = names[ERROR] or names[WARNING]
        if not worst:
            return None
        is_known = len(around.calls) == 1 and around.calls[0].is_literal
        where = f"at {worst[0]}" if is_known else f"if the level is {_listed(worst, 'or')}"
        return replace(self.finding, level=WARNING, note=f"{where}: {self.finding.note}")


def _setting(call: Initialization, level: str, around: Surroundings) -> Setting:
    return replace(call.at(level), float_sigmoid=around.float_sigmoid, scales_elsewhere=around.scales_elsewhere)


def _listed(names: Iterable[str], conjunction: str) -> str:
    """Names in a sentence, each once and in order: ``O1, O2 and O3``."""
    *first, last = sorted(set(names))
    return f"{', '.join(first)} {conjunction} {last}" if first else last
