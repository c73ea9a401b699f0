"""Notebooks, whose cells are code."""

from __future__ import annotations

import bisect
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampcompat.tools.check.split_lines import lines_of

MAGIC = re.compile(r"^(\s*)([%!?].*)$")
#: Outputs and metadata between two lines of code that are looked through.
WINDOW = 5000
HIDDEN = "#ampcompat magic:"


class NotANotebook(ValueError):
    """The file is not a notebook of the format that is read here."""


def is_notebook(name: str) -> bool:
    """Whether a file name is that of a notebook."""
    return name.endswith(".ipynb")


@dataclass
class Notebook:
    """The code of a notebook as one source, and its lines back in the notebook.

    Attributes:
        code: The cells one after the other; magics are comments.
        lines: For each line of ``code`` the line of the file, from 1; 0 where it has none.
    """

    code: str
    lines: list[int]

    @classmethod
    def read(cls, text: str) -> Notebook:
        """Parse the text of a notebook.

        Raises:
            NotANotebook: It is not JSON with cells.
        """
        try:
            cells = json.loads(text)["cells"]
            codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise NotANotebook(f"is not a notebook: {problem}") from None
        places = _places(text)
        at = 0
        code: list[str] = []
        lines: list[int] = []
        for cell in codes:
            is_other_language = cell.lstrip().startswith("%%") and not cell.lstrip().startswith(("%%time", "%%capture"))
            for line in lines_of(cell):
                place = _next_place(places.get(line, []), at)
                at = place or at
                lines.append(place)
                code.append(f"{HIDDEN}{line}" if is_other_language else MAGIC.sub(rf"\1{HIDDEN}\2", line))
        return cls("".join(f"{line}\n" for line in code), lines)

    def commands(self) -> Iterator[tuple[int, str]]:
        """Commands for the shell in the cells, with their lines in ``code``, from 1."""
        for number, line in enumerate(lines_of(self.code), 1):
            hidden = line.lstrip()
            if hidden.startswith(HIDDEN):
                yield number, hidden[len(HIDDEN) :]


def _places(text: str) -> dict[str, list[int]]:
    """For each line of a cell the lines of the file, from 1, that hold it: as a JSON string, one a line."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(lines_of(text), 1):
        shown = line.strip().removesuffix(",")
        if shown.startswith('"') and shown.endswith('"'):
            with contextlib.suppress(ValueError):
                found.setdefault(json.loads(shown).rstrip("\n"), []).append(number)
    return found


def _next_place(places: list[int], after: int) -> int:
    """The first of ``places`` behind ``after``, not too far away; 0 for none."""
    at = bisect.bisect_right(places, after)
    return places[at] if at < len(places) and places[at] <= after + WINDOW else 0
