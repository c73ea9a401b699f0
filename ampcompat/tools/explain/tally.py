"""Tell an ordinary back-off of the loss scale from a fault, and count the steps of a run."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ampcompat.tools.core import Optimizer, rank, was_skipped
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import warned
from ampcompat.tools.explain.underflow import Underflow
from ampcompat.tools.explain.verdict import Account

#: The last steps of an optimizer that are looked at. A scale that begins at 65536 is below 1 after 17 skips.
WINDOW = 20
#: How far a step of a known cause may be from one that it explains.
NEAR = 50


class BackOff:
    """The last steps of one optimizer. Dynamic scales skip a few steps at the start, and one now and then."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def add(self, skipped: bool) -> None:
        """Note a step."""
        self._last.append(skipped)

    def is_fault(self, scale: float) -> bool:
        """Whether overflows persist as the scale falls; ``scale`` is what it has come down to."""
        if scale < 1:
            return True
        return len(self._last) == WINDOW and sum(self._last) > WINDOW / 2

    def __str__(self) -> str:
        """As in "11 of the last 14 steps"."""
        return f"{sum(self._last)} of the last {len(self._last)} steps"


class Unknown(NamedTuple):
    """The key of steps whose cause is not known.

    Attributes:
        what: What was not finite: "loss" or "gradients".
        was_looked_into: Whether it was looked for.
    """

    what: str
    was_looked_into: bool = True


class Held(NamedTuple):
    """An explanation that is held back, and its cause; "" where that was not found."""

    message: Message
    cause: str


class Tally:
    """Observer that counts the steps of a run, and what each lost one was lost to.

    Attributes:
        steps: Steps of all optimizers.
        weights_lost_at: The first that left weights not finite, of a loss or gradients that were not; 0: none.
        has_told_unknown: Whether it was told of a lost step that its cause was not found.
        underflow: The latest step whose gradients were too small, if the latest steps were so.
    """

    def __init__(self) -> None:
        self.steps = self.weights_lost_at = 0
        self.has_told_unknown = False
        self.underflow: Underflow | None = None
        self._skipped: list[int] = []  # numbers of steps
        self._scales: list[str] = []  # what became of the loss scale at each of these, as in "came down to 128"
        self._not_finite: list[int] = []
        self._found: dict[Unknown, list[tuple[int, object]]] = {}  # steps like these that are known to be lost to a key
        self._unseen: list[int] = []
        self._lost_to: dict[int, object] = {}  # keys of faults by numbers of steps
        self._known: dict[object, str] = {}  # causes by the keys of their faults
        self._held: dict[object, Held] = {}  # what may be ordinary back-offs of the scale, the latest last

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count a step. A host sync where only the device knows whether it was skipped."""
        self.steps += 1
        if was_skipped(optimizer, skipped):
            self._skipped.append(self.steps)
            self._scales.append("")

    def scale_came_down(self, scale: str) -> None:
        """Note to what the loss scale came down at this step, which was skipped."""
        if self._scales:
            self._scales[-1] = scale

    # -- causes ------------------------------------------------------------------------------------------------------
    def lose(self, key: object, skipped: bool) -> None:
        """Note that this step was lost to the fault of ``key``; one that was not skipped was not finite."""
        self._lost_to[self.steps] = key
        if isinstance(key, Unknown) and not key.was_looked_into:
            self._unseen.append(self.steps)
        if not skipped:
            self._not_finite.append(self.steps)

    def put_down(self, steps: list[int], key: object) -> None:
        """Put those of ``steps`` whose cause is not known down to the fault of ``key``, to which the next was lost."""
        for step in steps:
            if isinstance(self._lost_to.get(step), Unknown):
                self._lost_to[step] = key

    def excuse(self, steps: list[int]) -> None:
        """Note that the loss scale has come down in ``steps``, and nothing else: a step was made at last."""
        for step in steps:
            if isinstance(self._lost_to.get(step), Unknown):
                del self._lost_to[step]

    def find(self, what: str, key: object, was_watched: bool) -> None:
        """Note that the fault of ``key`` has lost about this step, whose ``what`` was not finite.

        What the watch shows is likely to have lost the steps near it, too, that no forward explains.
        """
        kinds = [Unknown(what, False), Unknown(what)] if was_watched else [Unknown(what, False)]
        for kind in kinds:
            self._found.setdefault(kind, []).append((self.steps + 1, key))
            if kind.was_looked_into:
                self._held.pop(kind, None)

    def has_found(self, unknown: Unknown) -> bool:
        """Whether a step like those of ``unknown`` is known to be lost to a fault."""
        return unknown in self._found

    def know(self, key: object, cause: str) -> None:
        """Note the cause that the verdict names for ``key``."""
        self._known.setdefault(key, cause)

    def is_one(self, key: object, other: object) -> None:
        """Note that the fault of ``key`` is that of ``other``, which says more of it."""
        self._known[key] = self._known.get(other, self._known[key])

    def is_known(self, key: object) -> bool:
        """Whether the fault of ``key`` has a cause that the verdict names."""
        return key in self._known

    def hold(self, key: object, message: Message, cause: str = "") -> None:
        """Keep the explanation of what may be an ordinary back-off until that is known; ``cause`` is "" for none."""
        self._held.pop(key, None)
        self._held[key] = Held(message, cause)

    def is_held(self, key: object) -> bool:
        """Whether the explanation for ``key`` is held back."""
        return key in self._passed

    def is_costly(self, key: object) -> bool:
        """Whether the fault of ``key`` is held back, and has cost more steps than an ordinary back-off does."""
        return key in self._passed and len(self._steps_of(key)) > WINDOW / 2

    def release(self, key: object = None) -> Message | None:
        """The explanation that is held back for ``key``, or the latest: it is told now. None where there is none."""
        keys = [one for one in self._passed if key in (None, one)]
        if not keys:
            return None
        held = self._held[keys[-1]]
        self.know(keys[-1], held.cause)
        return held.message

    @property
    def _passed(self) -> dict[object, str]:
        """Faults that cost steps and may be gone at a lower scale: they were held back, and never explained."""
        return {key: one.cause for key, one in self._held.items() if one.cause and key not in self._known}

    def _steps_of(self, key: object) -> list[int]:
        return [step for step, its in self._lost_to.items() if its == key]

    # -- the end -----------------------------------------------------------------------------------------------------
    def last_explanation(self) -> Message | None:
        """What was held back without need: most steps were skipped, and nothing else explains it."""
        is_mostly_skipped = 2 * len(self._skipped) > self.steps
        if self._known or not is_mostly_skipped:
            return None
        message = self.release()
        if message is None and self._held and not self.has_told_unknown:
            message = [*self._held.values()][-1].message
        return message

    def account(self) -> Account:
        """What this process knows.

        A step whose cause is not known is put down to that of the nearest like it.
        """
        for step, key in self._lost_to.items():
            if isinstance(key, Unknown):
                self._lost_to[step] = self._key_near(step, key)
        return Account(
            rank=rank(),
            steps=self.steps,
            skipped=self._skipped,
            not_finite=self._not_finite,
            causes=self._by_cause(self._known),
            passed=self._by_cause(self._passed),
            unknown=[step for step, key in self._lost_to.items() if isinstance(key, Unknown)],
            unseen=self._unseen,
            has_told_unknown=self.has_told_unknown,
            scales=self._scales,
            warned=warned(),
            weights_lost_at=self.weights_lost_at,
            underflow="" if self.underflow is None else str(self.underflow),
        )

    def _key_near(self, step: int, unknown: Unknown) -> object:
        known = self._found.get(unknown, [])
        if unknown.was_looked_into:
            known = [one for one in known if abs(one[0] - step) <= NEAR]
        _, key = min(known, key=lambda one: abs(one[0] - step), default=(0, unknown))
        return key

    def _by_cause(self, causes: dict[object, str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for key, cause in causes.items():
            found.setdefault(cause, []).extend(self._steps_of(key))
        return found
