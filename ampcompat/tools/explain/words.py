"""One message of explain: words for people, or a line of JSON, on standard error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ampcompat._log import rank, say
from ampcompat.tools.data import as_data, plain
from ampcompat.tools.explain.schema import Fault, Said


@dataclass
class Message:
    """Hold one message.

    Attributes:
        head: The first line.
        data: What is said, for JSON.
        fields: Labels and texts of the lines below.
    """

    head: str
    data: Said
    fields: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        """The lines that people read."""
        who = f" (rank {rank()})" if rank() else ""
        return "\n".join(
            [f"ampcompat explain{who}: {self.head}", *(f"  {name:9} {text}" for name, text in self.fields)]
        )

    def line(self) -> str:
        """One line of JSON. Numbers that JSON has not are the strings "inf", "-inf" and "nan"."""
        return json.dumps(
            plain({"explain": self.data.kind, "rank": rank(), "message": self.head, **as_data(self.data)})
        )

    def emit(self, as_json: bool) -> None:
        """Write it to standard error, on rank 0; a fault on the rank that has it, whose batch no other rank knows."""
        say(self.line() if as_json else self.text(), error=True, all_ranks=isinstance(self.data, Fault))


def cure_fields(cures: list[str]) -> list[tuple[str, str]]:
    """The cures as fields, the likeliest first."""
    return [("or" if index else "cure", cure) for index, cure in enumerate(cures)]
