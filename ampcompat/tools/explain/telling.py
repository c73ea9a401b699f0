"""What is told of the faults that were found: each once, as many as were asked for, and some later or never.

A gradient that a lower loss scale may hold is no fault yet: its explanation waits until overflows persist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.messages import Message


@dataclass
class Explanation:
    """A fault that was found.

    Attributes:
        fault: The fault.
        head: What it has cost, as in "The loss of step 3 is nan.".
        step: The number of that step.
        is_told: Whether it is known to be a fault: it was told, or counted where enough was told before.
    """

    fault: Fault
    head: str
    step: int
    is_told: bool = False


class Telling:
    """Tell of faults, and remember which.

    Args:
        limit: Different faults that are explained; more are only counted.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        before_end: Called before the script ends.

    Attributes:
        left: How many may still be explained.
        found: The explanations by the keys of their faults, the latest last.
        has_told_unknown: Whether it was told that a cause was not found.
    """

    def __init__(self, limit: int, stop: bool, json: bool, before_end: Callable[[], None]) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self._before_end = before_end
        self.left = limit
        self.found: dict[str, Explanation] = {}
        self.has_told_unknown = False

    @property
    def told(self) -> list[Explanation]:
        """Those that were told."""
        return [one for one in self.found.values() if one.is_told]

    @property
    def untold(self) -> list[Explanation]:
        """Those that may be gone at a lower loss scale."""
        return [one for one in self.found.values() if not one.is_told]

    def is_told(self, key: str) -> bool:
        """Whether the fault of ``key`` was told."""
        return key in self.found and self.found[key].is_told

    def hold(self, fault: Fault, head: str, step: int) -> None:
        """Keep the explanation of what may be gone at a lower loss scale, in place of an earlier one."""
        self.found.pop(fault.key, None)
        self.found[fault.key] = Explanation(fault, head, step)

    def tell(self, fault: Fault, head: str, step: int) -> None:
        """Tell of a fault, unless it was told already or enough was told."""
        if not self.is_told(fault.key):
            self.hold(fault, head, step)
            self.found[fault.key].is_told = True
            self._explain(fault.message(head, step))

    def tell_unknown(self, head: str, step: int) -> None:
        """Tell, once, that a cause was not found."""
        if not self.has_told_unknown:
            self.has_told_unknown = True
            Message("unknown", head, content={"step": step}).emit(self.json)

    def _explain(self, message: Message) -> None:
        """Write an explanation, if there are any left; after the last, end the script if that was asked for."""
        if self.left == 0:
            return
        message.emit(self.json)
        self.left -= 1
        if self.left > 0:
            return
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        self._before_end()
        given = f"{self.limit} explanation{'s' if self.limit > 1 else ''}"
        Message("end", f"the script ends here, after {given}, as asked.").emit(self.json)
        raise SystemExit(1)
