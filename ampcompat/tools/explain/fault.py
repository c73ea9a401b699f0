"""One fault, whatever has found it: a place, a number and a cause, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.frames import ScriptLine


@dataclass
class Fault:
    """Something that went wrong, and what it has cost first."""

    what: str  # is not finite, or what half does not hold, in a sentence
    where: str  # the module, or the group of an optimizer
    cause: str  # the same in a few words, as the verdict names it
    key: str  # two faults with equal keys are the same
    head: str = ""  # what it has cost, as in "The loss of step 3 is nan."
    step: int = 0  # the number of that step
    number: float | None = None  # the largest magnitude in float32, or the number that half does not hold, if known
    line: ScriptLine | None = None  # the script's
    details: list[tuple[str, str]] = field(default_factory=list)  # labels and texts of what else is told
    growth: Grown | None = None  # of a weight, in the last steps, if that has to do with it
    wait: str = ""  # what to wait for, while the loss scale comes down
    hints: list[str] = field(default_factory=list)  # what to do, the likeliest first
    covers: list[str] = field(default_factory=list)  # keys of other faults that it tells of
    note: str = ""  # what makes this less than certain
    facts: dict[str, object] = field(default_factory=dict)  # what a line of JSON has besides
    all_ranks: bool = False  # whether it may be the fault of one rank's batch
    is_too_large: bool = False  # a gradient that float16 holds at no loss scale of 1 or more
    is_told: bool = False  # or counted, where enough was told before; otherwise a lower scale may end it

    def message(self) -> Message:
        """What is told of it."""
        lines = [("what", self.what), ("where", self.where)]
        if self.line is not None:
            lines.append(("line", str(self.line)))
        lines += self.details
        if self.growth is not None:
            lines.append(("growth", self.growth.text))
        hints = [self.wait, *self.hints] if self.wait else self.hints
        lines += [("or" if index else "hint", hint) for index, hint in enumerate(hints)]
        if self.note:
            lines.append(("note", self.note))
        content = {
            "step": self.step,
            "what": self.what,
            "where": self.where,
            "cause": self.cause,
            "number": self.number,
            "file": None if self.line is None else self.line.file,
            "line": None if self.line is None else self.line.number,
            "source": None if self.line is None else self.line.source,
            "growth": None if self.growth is None else self.growth.as_dict(),
            "hints": hints,
            "note": self.note,
            **self.facts,
        }
        return Message("fault", self.head, lines, content, all_ranks=self.all_ranks)
