"""What a rule is, and what its hits come to at the levels that are in force."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.initializations import ANY_LEVEL, Initialization
from ampcompat.tools.check.source import Source
from ampcompat.tools.level_table import Level


class Hit(NamedTuple):
    """Where a rule has found its mistake.

    Attributes:
        node: The place.
        note: What goes wrong, and the fix.
        is_certain: Whether the code proves it. What it does not prove is a warning.
    """

    node: ast.AST
    note: str
    is_certain: bool = True


@dataclass(frozen=True)
class Rule:
    """A mistake that is searched.

    Attributes:
        find: Finds the places in one file. Its name is that of the rule.
        applies: Whether what it finds is a mistake at a level; None for every level.
    """

    find: Callable[[Source], Iterator[Hit]]
    applies: Callable[[Level], bool] | None = None

    def suspects(self, source: Source) -> Iterator[Suspect]:
        """What the rule finds in a file, without the level that is in force there."""
        for hit in self.find(source):
            finding = source.finding(
                hit.node, "trap", self.find.__name__, ERROR if hit.is_certain else WARNING, hit.note
            )
            yield Suspect(self, finding)


class Suspect(NamedTuple):
    """A hit in a file, which is a mistake at the levels of its rule."""

    rule: Rule
    finding: Finding

    def judged(self, calls: Sequence[Initialization]) -> Finding | None:
        """The finding that it comes to; None where it is no mistake.

        Args:
            calls: The calls of ``initialize`` that govern the file; empty where none is known.
        """
        applies = self.rule.applies
        if applies is None:
            return self.finding
        usual = {call.usual for call in calls if call.usual is not None and applies(call.at(call.usual))}
        if calls and all(call.usual in usual for call in calls):
            default = "" if all(call.is_literal for call in calls) else ", the default"
            return self._noted(f"at {_listed(usual, 'and')}{default}", self.finding.level)
        bad = {name for call in calls or [ANY_LEVEL] for name in call.possible if applies(call.at(name))}
        return self._noted(f"if the level is {_listed(bad, 'or')}", WARNING) if bad else None

    def _noted(self, where: str, level: str) -> Finding:
        return replace(self.finding, level=level, note=f"{where}: {self.finding.note}")


def _listed(names: Iterable[str], conjunction: str) -> str:
    """Names in a sentence, in order: ``O1, O2 and O3``."""
    *first, last = sorted(names)
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def has_masters(level: Level) -> bool:
    """Whether the optimizer steps float32 masters."""
    return level.masters


def is_scaled(level: Level) -> bool:
    """Whether losses are multiplied by another number than 1."""
    return str(level.loss_scale) not in ("1", "1.0")


def unscales_or_copies(level: Level) -> bool:
    """Whether the end of a block changes gradients, or gives them to masters."""
    return has_masters(level) or is_scaled(level)


def is_float16(level: Level) -> bool:
    """Whether weights or functions are cast to float16."""
    return "float16" in (level.weights, level.functions)
