"""One fault, whatever has found it: a place, a number and a cause, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.frames import ScriptLine


@dataclass
class Fault:
    """Something that went wrong.

    Attributes:
        what: What is not finite, or what half does not hold, in a sentence.
        where: The module, or the group of an optimizer.
        cause: The same in a few words, as the verdict names it.
        key: Two faults with equal keys are the same.
        number: The largest magnitude in float32, or the number that half does not hold; None where it is not known.
        line: The script's line.
        details: Labels and texts of what else is told.
        growth: The weight that the last steps made many times larger, if that has to do with it.
        hints: What to do, the likeliest first.
        note: What makes this less than certain.
        facts: What a line of JSON has besides.
        all_ranks: Whether it may be the fault of one rank's batch.
        is_too_large: Whether it is a gradient that float16 holds at no loss scale of 1 or more.
    """

    what: str
    where: str
    cause: str
    key: str
    number: float | None = None
    line: ScriptLine | None = None
    details: list[tuple[str, str]] = field(default_factory=list)
    growth: Grown | None = None
    hints: list[str] = field(default_factory=list)
    note: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    all_ranks: bool = False
    is_too_large: bool = False

    def message(self, head: str, step: int) -> Message:
        """What is told of it; ``head`` says what it has cost the step numbered ``step``."""
        lines = [("what", self.what), ("where", self.where)]
        if self.line is not None:
            lines.append(("line", str(self.line)))
        lines += self.details
        if self.growth is not None:
            lines.append(("growth", self.growth.text))
        lines += [("or" if index else "hint", hint) for index, hint in enumerate(self.hints)]
        if self.note:
            lines.append(("note", self.note))
        content = {
            "step": step,
            "what": self.what,
            "where": self.where,
            "cause": self.cause,
            "number": self.number,
            "file": None if self.line is None else self.line.file,
            "line": None if self.line is None else self.line.number,
            "source": None if self.line is None else self.line.source,
            "growth": None if self.growth is None else asdict(self.growth),
            "hints": self.hints,
            "note": self.note,
            **self.facts,
        }
        return Message("fault", head, lines, content, all_ranks=self.all_ranks)
