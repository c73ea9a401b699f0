"""Hold the result of a migration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampcompat.check.lines import lines_of

if TYPE_CHECKING:
    from ampcompat.migrate.spread import Exposed

MARK = "# TODO(ampcompat): "


class MissingLibcst(ImportError):
    """libcst, which rewrites the sources, is not installed."""

    def __init__(self) -> None:
        super().__init__("ampcompat migrate rewrites sources with libcst: pip install 'ampcompat[migrate]'")


@dataclass
class Result:
    """One migrated source.

    Attributes:
        code: The new text; equal to the old one when there was nothing to do.
        todos: What could not be translated, as ``(line in the new text, message)``.
        exposed: What other files of the tree may use of it (``native``).
    """

    code: str
    todos: list[tuple[int, str]] = field(default_factory=list)
    exposed: Exposed | None = None

    @classmethod
    def of(cls, code: str) -> Result:
        """The result with its marks listed."""
        marks = [(n, line.strip()) for n, line in enumerate(lines_of(code), 1)]
        return cls(code, [(n, line[len(MARK) :]) for n, line in marks if line.startswith(MARK)])
