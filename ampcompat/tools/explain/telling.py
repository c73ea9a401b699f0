"""What is told of faults: each once, as many as were asked for, and some later or never.

A gradient that a lower loss scale may hold is no fault yet: its explanation is held back until overflows persist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.messages import Message


class Held(NamedTuple):
    """An explanation that is held back."""

    fault: Fault
    head: str
    step: int


class Telling:
    """Tell of faults, and remember which.

    Args:
        limit: Different faults that are explained; more are only counted.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        before_end: Called before the script ends.

    Attributes:
        left: How many may still be explained.
        causes: The causes of the faults that are known, by their keys.
        held: What was held back, by the keys of the faults, the latest last; it stays when it has been told.
        too_large: The gradients that were told to be too large at any loss scale.
        has_told_unknown: Whether it was told that a cause was not found.
    """

    def __init__(self, limit: int, stop: bool, json: bool, before_end: Callable[[], None]) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self._before_end = before_end
        self.left = limit
        self.causes: dict[str, str] = {}
        self.held: dict[str, Held] = {}
        self.too_large: Fault | None = None
        self.has_told_unknown = False

    def is_known(self, key: str) -> bool:
        """Whether the fault of ``key`` is known to be one."""
        return key in self.causes

    @property
    def untold(self) -> list[Held]:
        """What is held back and was not told, the latest last."""
        return [held for key, held in self.held.items() if not self.is_known(key)]

    def hold(self, fault: Fault, head: str, step: int) -> None:
        """Hold back what may be gone at a lower loss scale."""
        self.held.pop(fault.key, None)
        self.held[fault.key] = Held(fault, head, step)

    def tell(self, fault: Fault, head: str, step: int) -> None:
        """Tell of a fault, unless it was told already or enough was told."""
        if not self.is_known(fault.key):
            self.causes[fault.key] = fault.cause
            self.too_large = fault if fault.is_too_large else self.too_large
            self._explain(fault.message(head, step))

    def tell_held(self, held: Held, head: str = "", step: int = 0) -> None:
        """Tell what was held back: it is a fault, as ``head`` says of ``step``."""
        if head:
            held.fault.note = f"this is what step {held.step} showed, which was watched"
        self.tell(held.fault, head or held.head, step or held.step)

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
