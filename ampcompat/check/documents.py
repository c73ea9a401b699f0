"""Files beside Python sources: notebooks, whose cells are code, and files that install apex."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from ampcompat.check.lines import lines_of

NOTEBOOKS = ("*.ipynb",)
INSTALLS = (
    "requirements*.txt", "requirements*.in", "constraints*.txt", "Dockerfile*", "*.dockerfile", "setup.cfg",
    "pyproject.toml", "environment*.yml", "environment*.yaml",
)  # fmt: skip
# apex as a requirement, a download, a clone; "apex" in another word or in a path of the project is none of them.
INSTALL = re.compile(
    r"github\.com[/:]nvidia/apex|nvidia[-_]apex|(?:pip3?|conda|mamba)\s+install\b[^#\n]*\bapex\b"
    r"|^\s*-?\s*[\"']?apex(?:\[[^\]]*\])?\s*(?:[=<>!~@;].*)?[\"']?,?\s*(?:#.*)?$",
    re.IGNORECASE,
)
NOTEBOOK, INSTALLER = (re.compile("|".join(map(fnmatch.translate, names))) for names in (NOTEBOOKS, INSTALLS))
MAGIC = re.compile(r"^(\s*)([%!?].*)$")
CELL = "# ampcompat cell {}"
#: Outputs and metadata between two lines of code that are looked through.
WINDOW = 5000
HIDDEN = "#ampcompat magic:"


class NotANotebook(ValueError):
    """The file is no notebook of the format that is read here."""


def is_notebook(name: str) -> bool:
    """Whether a file name is that of a notebook."""
    return NOTEBOOK.match(name) is not None


def installs(name: str) -> bool:
    """Whether a file of that name may say what is to be installed."""
    return INSTALLER.match(name) is not None


def install_lines(text: str) -> Iterator[int]:
    """Lines, from 1, on which apex is installed; comments are not looked at."""
    for number, line in enumerate(lines_of(text), 1):
        if not line.lstrip().startswith("#") and INSTALL.search(line):
            yield number


class Cell(TypedDict):
    """A cell of a notebook, as far as it is read here."""

    cell_type: str
    source: str | list[str]


class Content(TypedDict):
    """Hold the part of a notebook's JSON that is read."""

    cells: list[Cell]


@dataclass
class Notebook:
    """The code of a notebook as one source, and the way back.

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
            raise NotANotebook(f"is no notebook: {problem}") from None
        notebook = cls(content)
        raw = lines_of(text)
        at = 0
        lines: list[str] = []
        for index, code in codes:
            lines.append(CELL.format(index))
            notebook.lines.append(0)
            for line in lines_of(code):
                at, place = _find(raw, at, line)
                notebook.lines.append(place)
                lines.append(MAGIC.sub(rf"\1{HIDDEN}\2", line))
            if code.lstrip().startswith("%%") and not code.lstrip().startswith(("%%time", "%%capture")):
                # A cell of another language.
                count = len(lines_of(code))
                lines[-count:] = [f"{HIDDEN}{line}" for line in lines_of(code)]
        notebook.code = "\n".join(lines) + "\n"
        return notebook


def _find(raw: list[str], at: int, line: str) -> tuple[int, int]:
    """Find the line of the file that holds a line of a cell (0 for none), and where to search on."""
    for index in range(at, min(at + WINDOW, len(raw))):
        text = raw[index].strip().removesuffix(",")
        if text.startswith('"') and text.endswith('"'):
            try:
                if json.loads(text).rstrip("\n") == line:
                    return index + 1, index + 1
            except ValueError:
                continue
    return at, 0
