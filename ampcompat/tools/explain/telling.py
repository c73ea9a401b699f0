"""Tell each fault once, and as many as were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ampcompat.tools.explain.birth import Lines
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import warned
from ampcompat.tools.words import counted


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

    def is_known(self, key: str) -> bool:
        """Whether the fault of ``key`` was told, or counted."""
        return key in self._words

    def tell(self, key: str, words: str, head: str, lines: Lines, content: Mapping[str, object], at: int) -> None:
        """Tell of a fault, unless it was told already or enough was told; the last may end the script.

        Args:
            key: Two faults with equal keys are the same.
            words: It in a few words.
            head: What it has cost, as in "the loss of step 3 is nan".
            lines: What is told of it.
            content: The same for a line of JSON.
            at: How many steps there were before.
        """
        is_new = key not in self._words
        words = self._words.setdefault(key, words)
        if self._seen_at.get(words) != at:
            self._seen_at[words] = at
            self.steps[words] += 1
        if not is_new or len(self._words) > self.limit:
            return
        lines = [*lines, *(("warned", mistake) for mistake in warned())]
        Message("fault", f"{head}.", lines, {**content, "warned": warned()}, all_ranks=True).emit(self.json)
        if len(self._words) == self.limit:
            self._end()

    def tell_unknown(self, head: str, lines: Lines, content: Mapping[str, object]) -> None:
        """Tell, once, and where nothing was told, that no birth was found."""
        if not self._has_told_unknown and not self._words:
            self._has_told_unknown = True
            Message("unknown", f"{head}.", lines, content).emit(self.json)

    def _end(self) -> None:
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        self._before_end()
        Message("end", f"the script ends here, after {counted(self.limit, 'explanation')}, as asked.").emit(self.json)
        raise SystemExit(1)
