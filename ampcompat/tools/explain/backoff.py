"""When a skipped step is a normal back-off of the loss scale, and no fault: every rule there is, over the rows.

A dynamic loss scale begins too high, and tries higher ones later; it comes down in steps that are skipped.

======================================================================  ==============================================
a skipped step                                                          is
======================================================================  ==============================================
of an optimizer that no block has named                                 normal
where overflows persist (:func:`overflows_persist`)                     a fault
that was watched, with a gradient that a lower scale holds              held back (:func:`may_be_back_off`)
at a loss scale that a step was made at before                          not known: the next steps are watched
otherwise: the scale falls                                              normal once a step is made, unless explained;
                                                                        after every third in a row one step is watched
======================================================================  ==============================================

At the end of a run in which most steps were skipped, what was held back is a fault too, if nothing else was told.
Otherwise what was held back is normal. Where nothing was told, and steps were only skipped, all of them are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.lost import FALLING, NORMAL, LostStep

#: The last steps that are looked at, and how many of them a back-off may skip. A scale that begins at 65536 is below 1
#: after 17 skips.
WINDOW, MOST_SKIPS = 20, 10
#: Of steps that are skipped in a row, after every so-manieth one is watched.
SKIPS_TO_A_WATCH = 3


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


def end_fall(last: Iterable[LostStep | None]) -> None:
    """Note that a step was made: the scale has come down, and that was all."""
    for row in falling(last):
        row.back_off = NORMAL


def deny_fall(last: Iterable[LostStep | None]) -> None:
    """Note that overflows persist: that was no way down to a scale that works."""
    for row in falling(last):
        row.back_off = ""


# -- one fault ---------------------------------------------------------------------------------------------------------
def may_be_back_off(event: Event, fault: Fault) -> bool:
    """Whether ``event``, which is told as ``fault``, may be gone at a lower loss scale."""
    return event.depends_on_scale and not fault.is_too_large


def costs_more_than_back_off(key: str, lost: Iterable[LostStep]) -> bool:
    """Whether the fault of ``key`` has lost more steps than a back-off does."""
    return sum(row.fault == key for row in lost) > MOST_SKIPS


# -- the run -----------------------------------------------------------------------------------------------------------
def is_mostly_skipped(lost: Iterable[LostStep], steps: int) -> bool:
    """Whether most of ``steps`` were skipped."""
    return 2 * len({row.number for row in lost if row.skipped}) > steps


def is_ordinary(lost: Sequence[LostStep], steps: int, is_anything_told: bool) -> bool:
    """Whether an ordinary back-off is all that there was, on every rank."""
    are_skips = bool(lost) and all(row.skipped for row in lost)
    return are_skips and not is_anything_told and not is_mostly_skipped(lost, steps)
