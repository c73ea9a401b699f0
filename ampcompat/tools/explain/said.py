"""One message of explain: words for people, or a line of JSON, on standard error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar

from ampcompat._log import rank, say
from ampcompat.tools.data import UNSAID, as_data, plain


@dataclass(kw_only=True)
class Said:
    """A message. Its line of JSON has the fields that a subclass adds, and the head.

    Attributes:
        kind: What the line of JSON calls it.
        all_ranks: Whether ranks other than 0 write it.
        head: The first line for people.
        lines: Labels and texts of the lines below.
    """

    kind: ClassVar[str]
    all_ranks: ClassVar[bool] = False
    head: str = field(default="", metadata=UNSAID)
    lines: list[tuple[str, str]] = field(default_factory=list, metadata=UNSAID)

    def text(self) -> str:
        """What people read."""
        who = f" (rank {rank()})" if rank() else ""
        below = [f"  {name:9} {text}" for name, text in self.lines]
        return "\n".join([f"ampcompat explain{who}: {self.head}", *below])

    def line(self) -> str:
        """One line of JSON. Numbers that JSON has not are the strings "inf", "-inf" and "nan"."""
        return json.dumps(plain({"explain": self.kind, "rank": rank(), "message": self.head, **as_data(self)}))

    def emit(self, as_json: bool) -> None:
        """Write it to standard error, on rank 0 and where it is for all ranks."""
        say(self.line() if as_json else self.text(), error=True, all_ranks=self.all_ranks)


class Note(Said):
    """Tell nothing but the message."""

    kind = "note"


class End(Said):
    """Tell that the script ends here."""

    kind = "end"


def cure_lines(cures: list[str]) -> list[tuple[str, str]]:
    """The cures, labelled, the likeliest first."""
    return [("or" if index else "cure", cure) for index, cure in enumerate(cures)]
