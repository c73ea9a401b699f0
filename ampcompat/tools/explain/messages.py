"""One message of explain: words for people, or a line of JSON, on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcompat.tools.core import rank, say
from ampcompat.tools.data import to_json


@dataclass
class Message:
    """A message."""

    kind: str  # what the line of JSON calls it
    head: str  # the first line for people
    lines: list[tuple[str, str]] = field(default_factory=list)  # labels and texts of the lines below
    content: Mapping[str, object] = field(default_factory=dict)  # what the line of JSON has besides
    all_ranks: bool = False  # whether ranks other than 0 write it

    def text(self) -> str:
        """What people read."""
        who = f" (rank {rank()})" if rank() else ""
        below = [f"  {name:9} {text}" for name, text in self.lines]
        return "\n".join([f"ampcompat explain{who}: {self.head}", *below])

    def emit(self, as_json: bool) -> None:
        """Write it to standard error, on rank 0 and where it is for all ranks."""
        line = {"explain": self.kind, "rank": rank(), "message": self.head, **self.content}
        say(to_json(line) if as_json else self.text(), error=True, all_ranks=self.all_ranks)
