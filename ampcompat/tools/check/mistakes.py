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
        names_level: Whether the levels at which it is a mistake are named.
    """

    node: ast.AST
    note: str
    grade: Grade | str
    names_level: bool = True


@dataclass(frozen=True)
class Suspect:
    """A mistake of one file, before it is known in which settings that file runs.

    Attributes:
        finding: What is reported of it, as an error at every level.
        grade: As of :class:`Mistake`.
        names_level: As of :class:`Mistake`.
        calls: The calls of ``initialize`` in the file that govern it.
    """

    finding: Finding
    grade: Grade | str
    names_level: bool
    calls: tuple[Initialization, ...]

    def judged(self, calls: Sequence[Initialization], float_sigmoid: bool, is_half_by_hand: bool) -> Finding | None:
        """The finding that it is; None where it is no mistake.

        Args:
            calls: The calls of ``initialize`` that govern it; empty if none is known.
            float_sigmoid: As of :class:`Setting`.
            is_half_by_hand: Whether a model is made half without ``initialize``.
        """
        if isinstance(self.grade, str):
            return replace(self.finding, level=self.grade)
        grade = self.grade
        if not calls and is_half_by_hand:
            level = grade(HALF_BY_HAND)
            return None if level is None else replace(self.finding, level=level)

        def grade_at(call: Initialization, name: str) -> str | None:
            return grade(replace(call.at(name), float_sigmoid=float_sigmoid))

        usual = [(call, call.usual_level) for call in calls]
        if calls and all(name is not None and grade_at(call, name) == ERROR for call, name in usual):
            names = [name for _, name in usual if name is not None]
            by_default = "" if all(call.is_literal for call in calls) else ", the default"
            return self._named(ERROR, f"at {_listed(names, 'and')}{by_default}: ")
        grades = {(name, grade_at(call, name)) for call in calls or [ANY_LEVEL] for name in call.levels()}
        names = [name for name, level in grades if level == ERROR] or [name for name, level in grades if level]
        if not names or not self.names_level:  # a mistake at some calls only, whatever the level
            return None
        is_known = bool(calls) and all(call.is_literal for call in calls)
        if is_known and len(calls) == 1:
            return self._named(WARNING, f"at {_listed(names, 'or')}: ")
        return self._named(WARNING, f"if the level is {_listed(names, 'or')}: ")

    def _named(self, level: str, levels: str) -> Finding:
        note = f"{levels}{self.finding.note}" if self.names_level else self.finding.note
        return replace(self.finding, level=level, note=note)


def _listed(names: Iterable[str], conjunction: str) -> str:
    """Names in a sentence, each once and in order: ``O1, O2 and O3``."""
    *first, last = sorted(set(names))
    return f"{', '.join(first)} {conjunction} {last}" if first else last
