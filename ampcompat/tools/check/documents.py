"""Notebooks, whose cells are code."""

from __future__ import annotations

import bisect
import contextlib
import json
from dataclasses import dataclass

from ampcompat.tools.check.cells import read_cell
from ampcompat.tools.check.split_lines import lines_of

#: Outputs and metadata between two lines of code that are looked through.
WINDOW = 5000


class NotANotebook(ValueError):
    """The file is not a notebook of the format that is read here."""


def is_notebook(name: str) -> bool:
    """Whether a file name is that of a notebook."""
    return name.endswith(".ipynb")


@dataclass
class Notebook:
    """The code of a notebook as one source, and its lines back in the notebook.

    Attributes:
        code: The cells one after the other.
        lines: For each line of ``code`` the line of the file, from 1; 0 where it has none.
        shell: For each line of ``code`` what it has for the shell or for a magic; "" where it is Python.
        left_out: Cells that Python does not parse: the line of ``code``, from 1, and the reason.
    """

    code: str
    lines: list[int]
    shell: list[str]
    left_out: list[tuple[int, str]]

    @classmethod
    def read(cls, text: str) -> Notebook:
        """Parse the text of a notebook.

        Raises:
            NotANotebook: It is not JSON with cells.
        """
        try:
            cells = json.loads(text)["cells"]
            texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise NotANotebook(f"is not a notebook: {problem}") from None
        code: list[str] = []
        shell: list[str] = []
        left_out: list[tuple[int, str]] = []
        for cell in map(read_cell, texts):
            if cell.problem is not None:
                left_out.append((len(code) + cell.line + 1, cell.problem))
            code += cell.code
            shell += cell.shell
        return cls("".join(f"{line}\n" for line in code), _lines_in_file(text, texts), shell, left_out)


def _lines_in_file(text: str, cells: list[str]) -> list[int]:
    """For each line of the cells the line of the file, from 1; 0 where it has none."""
    places = _places(text)
    at = 0
    lines: list[int] = []
    for line in (line for cell in cells for line in lines_of(cell)):
        place = _next_place(places.get(line, []), at)
        at = place or at
        lines.append(place)
    return lines


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
