"""Hold the result of a migration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampcompat.tools.check.split_lines import lines_of

MARK = "# TODO(ampcompat): "


@dataclass
class Result:
    """One migrated source.

    Attributes:
        code: The new text; equal to the old one when there was nothing to do.
        todos: What is left to the reader, as ``(line in the new text, message)``.
        notes: What differs, and needs no action, likewise.
        needs_amp: Whether it imports ``native_amp``.
    """

    code: str
    todos: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    needs_amp: bool = False

    @classmethod
    def of(cls, code: str, notes: Sequence[tuple[int, str]] = ()) -> Result:
        """The result with its marks listed."""
        marks = [(n, line.strip()) for n, line in enumerate(lines_of(code), 1)]
        return cls(code, [(n, line[len(MARK) :]) for n, line in marks if line.startswith(MARK)], list(notes))
