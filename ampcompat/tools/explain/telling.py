"""Tell each fault once, and as many as were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from ampcompat.tools.explain import meanings
from ampcompat.tools.explain.birth import Lines
from ampcompat.tools.explain.growth import Growth
from ampcompat.tools.explain.meanings import Row
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import warned
from ampcompat.tools.words import counted


@dataclass
class Fault:
    """What is told: a birth, or something else that has lost a step."""

    words: str  # it in a few words
    head: str  # what it has cost, as in "the loss of step 3 is nan"
    row: Row  # of the page
    lines: Lines  # its facts, as labels and texts
    content: Mapping[str, object]  # the same for a line of JSON
    step: int  # the number of the step
    key: str = ""  # two faults with equal keys are the same; those without one, if their words are
    growth: Growth | None = None  # of a weight, in the last steps

    def message(self, kind: str, all_ranks: bool) -> Message:
        """The message; growth stands first, and then no row is named that only puts it off, as float32 does."""
        rows = [self.row]
        lines = [*self.lines, ("means", self.row.means)]
        if self.growth is not None:
            rows = [meanings.GROWTH, *(row for row in rows if row not in (meanings.TOO_LARGE, meanings.GRADIENT))]
            lines.insert(0, ("growth", str(self.growth)))
        lines.append(("see", meanings.see(rows)))
        lines += [("warned", mistake) for mistake in warned()]
        content = {
            "kind": self.row.name,
            **self.content,
            "step": self.step,
            "growth": None if self.growth is None else asdict(self.growth),
            "means": self.row.means,
            "see": [row.name for row in rows],
            "warned": warned(),
        }
        return Message(kind, f"{self.head}.", lines, content, all_ranks)


class Telling:
    """Tell of faults, and count the steps that each was seen in.

    Args:
        limit: Different faults that are told; more are only counted.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        before_end: Called before the script ends.
    """

    def __init__(self, limit: int, stop: bool, json: bool, before_end: Callable[[], None]) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self._before_end = before_end
        self._words: dict[str, str] = {}  # of the faults that were told or counted, by their keys
        self.steps: Counter[str] = Counter()  # in how many lost steps each was seen, by its words
        self._seen_at: dict[str, int] = {}  # the last step that each was counted in
        self._has_told_unknown = False

    def is_known(self, fault: Fault) -> bool:
        """Whether the same was told, or counted."""
        return (fault.key or fault.words) in self._words

    def tell(self, fault: Fault, at: int) -> None:
        """Tell of a fault, unless it was told already or enough was told; the last may end the script.

        Args:
            fault: The fault.
            at: How many steps there were before.
        """
        is_new = not self.is_known(fault)
        words = self._words.setdefault(fault.key or fault.words, fault.words)
        if self._seen_at.get(words) != at:
            self._seen_at[words] = at
            self.steps[words] += 1
        if is_new and len(self._words) <= self.limit:
            fault.message("fault", all_ranks=True).emit(self.json)
            if len(self._words) == self.limit:
                self._end()

    def tell_unknown(self, fault: Fault) -> None:
        """Tell, once, and where nothing was told, that no birth was found."""
        if not self._has_told_unknown and not self._words:
            self._has_told_unknown = True
            fault.message("unknown", all_ranks=False).emit(self.json)

    def _end(self) -> None:
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        self._before_end()
        Message("end", f"the script ends here, after {counted(self.limit, 'explanation')}, as asked.").emit(self.json)
        raise SystemExit(1)
