"""Tell an ordinary back-off of the loss scale from a fault, and sum up a run at its end."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from ampcompat.tools.core import Optimizer, was_skipped
from ampcompat.tools.explain.messages import Message

#: The last steps of an optimizer that are looked at. A scale that begins at 65536 is below 1 after 17 skips.
WINDOW = 20


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


class Tally:
    """Observer that counts the steps of a run, and what each lost one was lost to.

    Attributes:
        steps: Steps of all optimizers.
        skipped: Those that were skipped.
        not_finite: Those that were made with a loss or gradient that is not finite, or that wrote such weights.
        scale: The loss scale after the latest of those that were skipped.
        explained: The causes that were explained.
        not_found: How many steps a fault is known to have cost, and not which.
    """

    def __init__(self) -> None:
        self.steps = self.skipped = self.not_finite = 0
        self.scale = 0.0
        self.not_found = 0
        self._causes: Counter[str] = Counter()
        self.explained: list[str] = []
        self._held: Message | None = None

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count a step. A host sync where only the device knows whether it was skipped."""
        self.steps += 1
        self.skipped += was_skipped(optimizer, skipped)

    # -- causes ------------------------------------------------------------------------------------------------------
    def lose(self, cause: str) -> None:
        """Note a step that was lost to ``cause``."""
        self._causes[cause] += 1

    def rename(self, unknown: str, cause: str) -> None:
        """Note that steps lost to ``unknown`` were lost to ``cause``."""
        self._causes[cause] += self._causes.pop(unknown, 0)
        self.not_found = 0

    def explain(self, cause: str) -> None:
        """Note that ``cause`` was explained."""
        if cause not in self.explained:
            self.explained.append(cause)

    def hold(self, message: Message) -> None:
        """Keep the explanation of what may be an ordinary back-off, for a run that ends before that is known."""
        self._held = message

    # -- the end -----------------------------------------------------------------------------------------------------
    @property
    def _is_mostly_lost(self) -> bool:
        return 2 * self.skipped > self.steps

    def last_words(self) -> list[Message]:
        """What is to be told when the run ends: the verdict, and before it what was held back without need."""
        if self.steps == 0:
            return []
        found = []
        if not self.explained and self._held is not None and self._is_mostly_lost:
            found.append(self._held)
            self.explain(self._held.cause)
        causes = [{"cause": cause, "steps": self._causes[cause]} for cause in self._in_order()]
        content: dict[str, Any] = {
            "steps": self.steps,
            "skipped": self.skipped,
            "not_finite": self.not_finite,
            "causes": causes,
        }
        return [*found, Message("verdict", self._verdict(), content=content)]

    def _in_order(self) -> list[str]:
        """The explained causes, those that cost most steps first."""
        return sorted(self.explained, key=lambda cause: -self._causes[cause])

    def _verdict(self) -> str:
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        were = "was" if self.skipped == 1 else "were"
        lost = self.skipped + self.not_finite
        if lost == 0 and not self.explained:
            return f"none of {steps} was skipped."
        counts = []
        if self.skipped or not self.not_finite:
            counts.append(f"{self.skipped} of {steps} {were} skipped")
        if self.not_finite:
            counts.append(f"{self.not_finite} of {steps} had a loss, a gradient or a weight that is not finite")
        head = ", ".join(counts)
        if self.explained:
            also = f"; of {self.not_found} of these it was not found" if self.not_found else ""
            return f"{head}; {self._cause(lost)}{also}."
        if self.not_found:
            of_which = "" if self.not_found >= lost else f" of {self.not_found} of these"
            return f"{head}; the cause{of_which} was not found."
        if self._is_mostly_lost or self.not_finite:
            return f"{head}; the cause was not found."
        return f"{head} while the loss scale came down to {self.scale:g}: that is normal."

    def _cause(self, lost: int) -> str:
        first, *others = self._in_order()
        count = self._causes[first]
        of_which = "" if count >= lost else f" of {count} of these"
        also = f", and of others {' and '.join(others)}" if others else ""
        return f"the cause{of_which} is {first}{also}"
