"""The steps that were lost, a row each, and every rule over these rows: what is a normal back-off, and what a fault.

A dynamic loss scale begins too high, and tries higher ones later; it comes down in steps that are skipped.

======================================================================  ==============================================
a skipped step                                                          is
======================================================================  ==============================================
of an optimizer that no block has named                                 normal
where overflows persist (:func:`overflows_persist`)                     a fault
that was watched, with a gradient that a lower scale holds              held back, until overflows persist
at a loss scale that a step was made at before                          not known: the next steps are watched
otherwise: the scale falls                                              normal once a step is made, unless explained;
                                                                        after every third in a row one step is watched
======================================================================  ==============================================

At the end of a run in which most steps were skipped, what was held back is a fault too, if nothing else was told.
Otherwise what was held back is normal. Where nothing was told, and steps were only skipped, all of them are.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

#: What a skipped step is, while the loss scale comes down, and once a step was made after it.
FALLING, NORMAL = "falling", "normal"
#: The last steps that are looked at, and how many of them a back-off may skip. A scale that begins at 65536 is below 1
#: after 17 skips.
WINDOW, MOST_SKIPS = 20, 10
#: After so many steps that were skipped in a row, one is watched.
SKIPS_TO_A_WATCH = 3
#: How far a step of a known cause may be from one that it explains.
NEAR = 50


@dataclass
class LostStep:
    """A step that was skipped, or made with a loss, gradients or weights that are not finite."""

    what: str  # was not finite: "loss", "gradients" or "weights"
    fault: str = ""  # the key of the fault that it was lost to; "" where that is not known
    was_watched: bool = False  # as it ran
    was_looked_into: bool = True  # otherwise nothing was left to look with
    back_off: str = ""  # FALLING or NORMAL; "" where it is no back-off, or not known to be one
    number: int = 0  # among the steps of all optimizers, from 1
    skipped: bool = False
    scale: str = ""  # what became of the loss scale, as in "came down to 128"; "" where nothing did
    of_loss: str = ""  # which scale that is, where there are several, as in "of loss 1 "

    @property
    def is_unknown(self) -> bool:
        """Whether it is not known what it was lost to."""
        return not self.fault and self.back_off != NORMAL


# -- one optimizer: ``last`` are its last WINDOW steps, with None for those that were not lost -------------------------
def overflows_persist(last: Collection[LostStep | None], scale: float) -> bool:
    """Whether overflows persist as the scale falls; ``scale`` is what it has come down to."""
    return scale < 1 or (len(last) == WINDOW and _skips(last) > MOST_SKIPS)


def skipped_of(last: Collection[LostStep | None]) -> str:
    """As in "11 of the last 14 steps"."""
    return f"{_skips(last)} of the last {len(last)} steps"


def _skips(last: Iterable[LostStep | None]) -> int:
    return sum(row is not None and row.skipped for row in last)


def falling(last: Iterable[LostStep | None]) -> list[LostStep]:
    """The steps in which the scale has come down, if it still does."""
    return [row for row in last if row is not None and row.back_off == FALLING]


def end_fall(last: Iterable[LostStep | None], back_off: str) -> None:
    """Note what the fall of the scale was: NORMAL once a step is made, "" where overflows persist."""
    for row in falling(last):
        row.back_off = back_off


# -- the run -----------------------------------------------------------------------------------------------------------
def is_mostly_skipped(lost: Iterable[LostStep], steps: int) -> bool:
    """Whether most of ``steps`` were skipped."""
    return 2 * len({row.number for row in lost if row.skipped}) > steps


def put_down(lost: Sequence[LostStep]) -> list[LostStep]:
    """The same steps, each whose cause is not known put down to the fault of the nearest like it.

    What the watch shows is likely to have lost the steps near it, too, that running a forward again did not explain.
    """
    known = _by_what(row for row in lost if row.fault and row.was_looked_into)
    watched = _by_what(row for row in lost if row.fault and row.was_watched)
    found = []
    for row in lost:
        like = watched if row.was_looked_into else known
        nearest = _nearest(row, like.get(row.what, []))
        is_near = abs(nearest.number - row.number) <= NEAR or not row.was_looked_into
        found.append(replace(row, fault=nearest.fault) if row.is_unknown and is_near else row)
    return found


def is_single_skip(row: LostStep, unknown: Sequence[int]) -> bool:
    """Whether ``row`` is a skip at a loss scale that had worked, and nothing near it is like it: gradients grew.

    Args:
        row: a lost step whose cause is not known.
        unknown: the numbers of all such, on all ranks, in order.
    """
    if row.what != "gradients" or not row.skipped:
        return False
    first = bisect.bisect_left(unknown, row.number - NEAR)
    after_last = bisect.bisect_right(unknown, row.number + NEAR)
    return after_last - first == 1


def _by_what(lost: Iterable[LostStep]) -> dict[str, list[LostStep]]:
    found: dict[str, list[LostStep]] = {}
    for row in lost:
        found.setdefault(row.what, []).append(row)
    return found


def _nearest(row: LostStep, others: list[LostStep]) -> LostStep:
    """The one of ``others``, which are in order, that is nearest to ``row``; itself where there is none."""
    at = bisect.bisect(others, row.number, key=lambda one: one.number)
    around = others[max(at - 1, 0) : at + 1]
    return min(around, key=lambda one: abs(one.number - row.number), default=row)
