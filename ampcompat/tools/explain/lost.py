"""The steps that were lost: one row each, and what becomes of the rows whose cause is not known."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: How far a step of a known cause may be from one that it explains.
NEAR = 50
#: What a skipped step has to do with the way of the loss scale down: the scale is on it, or has come to its end.
FALLING, NORMAL = "falling", "normal"


@dataclass
class LostStep:
    """A step that was skipped, or made with a loss, gradients or weights that are not finite.

    Attributes:
        what: What was not finite: "loss", "gradients" or "weights".
        fault: The key of the fault that it was lost to; "" where that is not known.
        was_watched: Whether the step was watched as it ran.
        was_looked_into: Whether its cause was looked for.
        back_off: :data:`FALLING` or :data:`NORMAL`, as ``backoff`` says; "" for a step that is no back-off.
        number: Its number among the steps of all optimizers, from 1.
        skipped: Whether it was skipped.
        scale: What became of the loss scale, as in "came down to 128"; "" where nothing did.
    """

    what: str
    fault: str = ""
    was_watched: bool = False
    was_looked_into: bool = True
    back_off: str = ""
    number: int = 0
    skipped: bool = False
    scale: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether it is not known what it was lost to."""
        return not self.fault and self.back_off != NORMAL


def has_found(lost: Sequence[LostStep], what: str) -> bool:
    """Whether the watch has shown why the ``what`` of a step was not finite."""
    return any(one.what == what and one.was_watched and one.fault for one in lost)


def put_down(lost: Sequence[LostStep]) -> list[LostStep]:
    """The same steps, each whose cause is not known put down to the fault of the nearest like it.

    What the watch shows is likely to have lost the steps near it, too, that running a forward again did not explain.
    """
    known: dict[str, list[LostStep]] = {}
    watched: dict[str, list[LostStep]] = {}
    for step in lost:
        if step.fault and step.was_looked_into:
            known.setdefault(step.what, []).append(step)
        if step.fault and step.was_watched:
            watched.setdefault(step.what, []).append(step)
    found = []
    for step in lost:
        like = watched if step.was_looked_into else known
        nearest = _nearest(step, like.get(step.what, []))
        is_near = abs(nearest.number - step.number) <= NEAR or not step.was_looked_into
        found.append(replace(step, fault=nearest.fault) if step.is_unknown and is_near else step)
    return found


def _nearest(step: LostStep, others: list[LostStep]) -> LostStep:
    """The one of ``others``, which are in order, that is nearest to ``step``; itself where there is none."""
    at = bisect.bisect(others, step.number, key=lambda one: one.number)
    around = others[max(at - 1, 0) : at + 1]
    return min(around, key=lambda one: abs(one.number - step.number), default=step)
