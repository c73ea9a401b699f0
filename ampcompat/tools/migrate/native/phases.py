"""What the gradients of an optimizer are at some statement, on some path that leads there.

| phase | meaning |
|---|---|
| entry | whatever they were when the function was called |
| clear | there are none, or zeros |
| scaled | a scaled loss had its backward pass |
| unscaled | the same, and ``unscale_`` was called |
| spent | they were cleared after ``unscale_``, which the scaler remembers until its update |
| stepped | the optimizer stepped, or the step was left out; they are still there |

Beside its phase an optimizer has the plain ``backward()`` calls whose gradients it may hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import libcst as cst

from ampcompat.tools.migrate.native.file import Variable


class Phase(NamedTuple):
    """What the gradients of an optimizer are on some path.

    Attributes:
        kind: One of the phases above.
        plain: Plain ``backward()`` calls whose gradients are among them.
        places: Where ``unscale_`` was called.
        over: Steps of other optimizers that were made since they were scaled.
        stale: Scaled losses whose gradients were added to those of a step before.
    """

    kind: str
    plain: frozenset[cst.CSTNode] = frozenset()
    places: frozenset[cst.CSTNode] = frozenset()
    over: frozenset[cst.CSTNode] = frozenset()
    stale: frozenset[cst.CSTNode] = frozenset()


CLEAR = Phase("clear")
ENTRY = Phase("entry")
PENDING = ("entry", "scaled", "unscaled")
State = dict[Variable, frozenset[Phase]]


def cleared(phase: Phase) -> Phase:
    """The phase after the gradients were cleared."""
    return Phase("spent", places=phase.places) if phase.kind in ("unscaled", "spent") else CLEAR


def join(states: Iterable[State | None]) -> State | None:
    """What holds where paths meet; None where none arrives."""
    found: State | None = None
    for state in states:
        if state is None:
            continue
        if found is None:
            found = dict(state)
            continue
        for one, phases in state.items():
            found[one] = found.get(one, frozenset()) | phases
    return found
