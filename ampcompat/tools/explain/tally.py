"""Tell an ordinary back-off of the loss scale from a fault, and sum up a run at its end."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, NamedTuple

from ampcompat.tools.core import Optimizer, was_skipped
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.underflow import Underflow

#: The last steps of an optimizer that are looked at. A scale that begins at 65536 is below 1 after 17 skips.
WINDOW = 20
#: Keys of steps that were looked at in vain; of the latter it is known that code after the models lost them.
UNKNOWN, AFTER_MODELS = "unknown", "after the models"


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


class Held(NamedTuple):
    """An explanation that is held back, and its cause; "" where that was not found."""

    message: Message
    cause: str


class Tally:
    """Observer that counts the steps of a run, and what each lost one was lost to.

    Attributes:
        steps: Steps of all optimizers.
        skipped: Those that were skipped.
        not_finite: Those that were made with a loss or gradient that is not finite, or that wrote such weights.
        scale: What became of the loss scale at the latest of these, as in "came down to 128".
        has_told_unknown: Whether it was told of a lost step that its cause was not found.
        underflow: The latest step whose gradients were too small, if the latest steps were so.
    """

    def __init__(self) -> None:
        self.steps = self.skipped = self.not_finite = 0
        self.scale = ""
        self.has_told_unknown = False
        self.underflow: Underflow | None = None
        self._lost_to: Counter[object] = Counter()
        self._explained: dict[object, str] = {}  # causes by the keys of their faults
        self._held: dict[object, Held] = {}  # what may be ordinary back-offs of the scale, the latest last

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count a step. A host sync where only the device knows whether it was skipped."""
        self.steps += 1
        self.skipped += was_skipped(optimizer, skipped)

    # -- causes ------------------------------------------------------------------------------------------------------
    def lose(self, key: object) -> None:
        """Note a step that was lost to the fault of ``key``."""
        self._lost_to[key] += 1

    def rename(self, unknown: object, key: object) -> None:
        """Note that steps that were lost to ``unknown`` were lost to the fault of ``key``."""
        self._lost_to[key] += self._lost_to.pop(unknown, 0)

    def explain(self, key: object, cause: str) -> None:
        """Note that the fault of ``key`` was explained, and what the verdict calls it."""
        self._explained.setdefault(key, cause)

    def is_explained(self, key: object) -> bool:
        """Whether the fault of ``key`` was explained."""
        return key in self._explained

    def hold(self, key: object, message: Message, cause: str = "") -> None:
        """Keep the explanation of what may be an ordinary back-off until that is known; ``cause`` is "" for none."""
        self._held.pop(key, None)
        self._held[key] = Held(message, cause)

    def is_costly(self, key: object) -> bool:
        """Whether the fault of ``key`` is held back, and has cost more steps than an ordinary back-off does."""
        return key in self._passed and self._lost_to[key] > WINDOW / 2

    def release(self, key: object = None) -> Message | None:
        """The explanation that is held back for ``key``, or the latest: it is told now. None where there is none."""
        keys = [one for one in self._passed if key in (None, one)]
        if not keys:
            return None
        held = self._held[keys[-1]]
        self.explain(keys[-1], held.cause)
        return held.message

    # -- the end -----------------------------------------------------------------------------------------------------
    @property
    def _lost(self) -> int:
        return self.skipped + self.not_finite

    @property
    def _is_mostly_lost(self) -> bool:
        return 2 * self.skipped > self.steps

    @property
    def _passed(self) -> dict[object, str]:
        """Faults that cost steps and may be gone at a lower scale: they were held back, and never explained."""
        held = self._held.items()
        return {key: one.cause for key, one in held if one.cause and key not in self._explained}

    @property
    def _is_ordinary(self) -> bool:
        """Whether an ordinary back-off of the scale is all that there was."""
        is_known = self.not_finite == 0 and not self._explained and not self._is_mostly_lost
        return is_known and self.skipped > 0 and not self.has_told_unknown

    def last_words(self) -> list[Message]:
        """What is to be told when the run ends: the verdict, and before it what was held back without need."""
        if self.steps == 0:
            return []
        found = []
        if not self._explained and self._is_mostly_lost:
            message = self.release()
            if message is None and self._held and not self.has_told_unknown:
                message = [*self._held.values()][-1].message
            if message is not None:
                found.append(message)
        causes = [{"cause": cause, "steps": self._lost_to[key]} for key, cause in self._in_order()]
        content: dict[str, Any] = {
            "steps": self.steps,
            "skipped": self.skipped,
            "not_finite": self.not_finite,
            "causes": causes,
            "underflow": None if self.underflow is None else self.underflow.as_dict(),
        }
        return [*found, Message("verdict", self._verdict(), content=content)]

    def _in_order(self) -> list[tuple[object, str]]:
        """The explained faults, those that cost most steps first."""
        return sorted(self._explained.items(), key=lambda fault: -self._lost_to[fault[0]])

    def _verdict(self) -> str:
        if self._is_ordinary:
            said = f"{self._counts()} while the loss scale {self.scale}: that is normal"
        elif self._lost:
            said = f"{self._counts()}; {self._causes()}"
        elif self._explained:
            said = f"{self._counts()}; a batch was lost to {' and to '.join(self._explained.values())}"
        else:
            said = self._counts()
        return f"{said}." if self.underflow is None else f"{said}, but {self.underflow}."

    def _counts(self) -> str:
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        if self._lost == 0:
            return f"none of {steps} was skipped"
        counts = []
        if self.skipped:
            counts.append(f"{self.skipped} of {steps} {_were(self.skipped)} skipped")
        if self.not_finite:
            counts.append(f"{self.not_finite} of {steps} had a loss, a gradient or a weight that is not finite")
        return ", ".join(counts)

    def _causes(self) -> str:
        """What the lost steps were lost to, all of them."""
        told = [(self._lost_to[key], cause) for key, cause in self._in_order()]
        passed = self._passed
        if self._is_mostly_lost:  # a scale that costs most steps is not normal
            told += [(self._lost_to[key], cause) for key, cause in passed.items()]
            passed = {}
        ordinary = sum(self._lost_to[key] for key in passed)
        unknown = self._lost_to[UNKNOWN] + self._lost_to[AFTER_MODELS]
        unseen = self._lost - sum(count for count, _ in told) - unknown - ordinary
        parts: list[str] = []
        for count, cause in told:
            of_which = "" if count >= self._lost else f" of {count} of these"
            parts.append(f"that of {count} is {cause}" if parts else f"the cause{of_which} is {cause}")
        if unknown:
            of_which = "" if unknown >= self._lost else f" of {unknown} of these"
            parts.append(f"the cause{of_which} was not found")
        if ordinary:
            parts.append(f"{ordinary} {_were(ordinary)} lost while the loss scale {self.scale}, which is normal")
        if unseen > 0:
            parts.append(f"{unseen} {_were(unseen)} lost after the last explanation")
        return "; ".join(parts)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
