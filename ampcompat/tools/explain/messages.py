"""One message of explain: words for people, or a line of JSON, on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcompat.tools.core import rank, say
from ampcompat.tools.data import to_json


@dataclass
class Message:
    """A message.

    Attributes:
        kind: What the line of JSON calls it.
        head: The first line for people.
        lines: Labels and texts of the lines below.
        content: What the line of JSON has besides kind, rank and head.
        all_ranks: Whether ranks other than 0 write it.
    """

    kind: str
    head: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    content: Mapping[str, object] = field(default_factory=dict)
    all_ranks: bool = False

    def text(self) -> str:
        """What people read."""
        who = f" (rank {rank()})" if rank() else ""
        below = [f"  {name:9} {text}" for name, text in self.lines]
        return "\n".join([f"ampcompat explain{who}: {self.head}", *below])

    def line(self) -> str:
        """One line of JSON."""
        return to_json({"explain": self.kind, "rank": rank(), "message": self.head, **self.content})

    def emit(self, as_json: bool) -> None:
        """Write it to standard error, on rank 0 and where it is for all ranks."""
        say(self.line() if as_json else self.text(), error=True, all_ranks=self.all_ranks)
