"""Notebooks, whose cells are code."""

from __future__ import annotations

import bisect
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from ampcompat.tools.check.split_lines import lines_of

MAGIC = re.compile(r"^(\s*)([%!?].*)$")
CELL = "# ampcompat cell {}"
#: Outputs and metadata between two lines of code that are looked through.
WINDOW = 5000
HIDDEN = "#ampcompat magic:"


class NotANotebook(ValueError):
    """The file is not a notebook of the format that is read here."""


def is_notebook(name: str) -> bool:
    """Whether a file name is that of a notebook."""
    return name.endswith(".ipynb")


class Cell(TypedDict):
    """A cell of a notebook, as far as it is read here."""

    cell_type: str
    source: str | list[str]


class Content(TypedDict):
    """Hold the part of a notebook's JSON that is read."""

    cells: list[Cell]


@dataclass
class Notebook:
    """The code of a notebook as one source, and its lines back in the notebook.

    Attributes:
        content: The parsed file.
        code: The cells one after the other, each after a comment that names it; magics are comments.
        lines: For each line of ``code`` the line of the file, from 1; 0 where it has none.
    """

    content: Content
    code: str = ""
    lines: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Notebook:
        """Parse the text of a notebook.

        Raises:
            NotANotebook: It is not JSON with cells.
        """
        try:
            content: Content = json.loads(text)
            cells = content["cells"]
            codes = [(i, "".join(cell["source"])) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise NotANotebook(f"is not a notebook: {problem}") from None
        notebook = cls(content)
        places = _places(text)
        at = 0
        lines: list[str] = []
        for index, code in codes:
            lines.append(CELL.format(index))
            notebook.lines.append(0)
            for line in lines_of(code):
                place = _next_place(places.get(line, []), at)
                at = place or at
                notebook.lines.append(place)
                lines.append(MAGIC.sub(rf"\1{HIDDEN}\2", line))
            if code.lstrip().startswith("%%") and not code.lstrip().startswith(("%%time", "%%capture")):
                # A cell of another language.
                count = len(lines_of(code))
                lines[-count:] = [f"{HIDDEN}{line}" for line in lines_of(code)]
        notebook.code = "\n".join(lines) + "\n"
        return notebook

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
