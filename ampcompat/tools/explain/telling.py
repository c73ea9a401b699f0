"""What is told of the faults that were found: each once, as many as were asked for, and some later or never.

A gradient that a lower loss scale may hold is no fault yet: its explanation waits until overflows persist.
"""

from __future__ import annotations

from collections.abc import Callable

from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.words import counted


class Telling:
    """Tell of faults, and remember which.

    Args:
        limit: Different faults that are explained; more are only counted.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        before_end: Called before the script ends.
    """

    def __init__(self, limit: int, stop: bool, json: bool, before_end: Callable[[], None]) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self._before_end = before_end
        self.left = limit  # how many may still be explained
        self.found: dict[str, Fault] = {}  # by their keys, the latest last
        self.has_told_unknown = False  # that a cause was not found

    @property
    def told(self) -> list[Fault]:
        """Those that were told."""
        return [fault for fault in self.found.values() if fault.is_told]

    @property
    def held(self) -> list[Fault]:
        """Those that may be gone at a lower loss scale."""
        return [fault for fault in self.found.values() if not fault.is_told]

    def is_told(self, key: str) -> bool:
        """Whether the fault of ``key`` was told."""
        return key in self.found and self.found[key].is_told

    def hold(self, fault: Fault) -> None:
        """Keep the explanation of what may be gone at a lower loss scale, in place of an earlier one."""
        self.found.pop(fault.key, None)
        self.found[fault.key] = fault

    def tell(self, fault: Fault) -> None:
        """Tell of a fault, unless it was told already or enough was told; the last may end the script."""
        if self.is_told(fault.key):
            return
        self.hold(fault)
        fault.is_told = True
        if self.left == 0:
            return
        fault.message().emit(self.json)
        self.left -= 1
        if self.left == 0:
            self._end()

    def held_for_nothing(self) -> list[Message]:
        """What was held back in a run that has told nothing else."""
        if self.told or not self.held:
            return []
        latest = self.held[-1]
        latest.is_told = True
        return [latest.message()]

    def tell_unknown(self, head: str, step: int) -> None:
        """Tell, once, that a cause was not found."""
        if not self.has_told_unknown:
            self.has_told_unknown = True
            Message("unknown", head, content={"step": step}).emit(self.json)

    def _end(self) -> None:
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        self._before_end()
        given = f"{counted(self.limit, 'explanation')}"
        Message("end", f"the script ends here, after {given}, as asked.").emit(self.json)
        raise SystemExit(1)
