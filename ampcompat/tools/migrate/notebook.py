"""A notebook with other code: the text of each cell that did not change stays byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampcompat.tools.check.documents import HIDDEN, NotANotebook, Notebook
from ampcompat.tools.check.split_lines import lines_of

COMMENT = re.compile(r"^# ampcompat cell \d+$", re.MULTILINE)
MARKER = re.compile(r"(\s*)\"# ampcompat cell (\d+)\"")
BLANK = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()


class Span(NamedTuple):
    """A value in the text of a JSON file: where it begins and ends."""

    start: int
    end: int


def as_source(notebook: Notebook) -> str:
    """The code of all cells, with a statement where each begins: a comment would go with the statement below it."""
    return COMMENT.sub(r'"\g<0>"', notebook.code)


def written(text: str, notebook: Notebook, code: str) -> str:
    """The text of a notebook with its cells taken from ``code``.

    Args:
        text: The text of the file.
        notebook: What was read of it.
        code: What became of :func:`as_source`.

    Raises:
        NotANotebook: A statement of the new code spans two cells.
    """
    new_sources = _split(code)
    old_sources = _split(as_source(notebook))
    if sorted(new_sources) != sorted(old_sources):
        raise NotANotebook("the cells of the notebook cannot be told apart after the migration")
    spans = list(_source_spans(text))
    for index in sorted(new_sources, reverse=True):
        if new_sources[index] == old_sources[index]:
            continue
        span = spans[index]
        ends_line = json_text(text, span).endswith("\n")
        source = "\n".join(new_sources[index]).rstrip("\n") + ("\n" if ends_line else "")
        text = text[: span.start] + _as_json(source, text[span.start : span.end]) + text[span.end :]
    return text


def json_text(text: str, span: Span) -> str:
    """The source of a cell: a string, or a list of lines."""
    value = json.loads(text[span.start : span.end])
    return value if isinstance(value, str) else "".join(value)


def _split(code: str) -> dict[int, list[str]]:
    """The lines of each cell, by its number among all cells."""
    cells: dict[int, list[str]] = {}
    current: list[str] = []
    for line in lines_of(code):
        marker = MARKER.fullmatch(line)
        if marker is None:
            current.append(re.sub(rf"^(\s*){HIDDEN}", r"\1", line))
        elif marker[1]:
            raise NotANotebook("a statement would span two cells of the notebook; put them into one")
        else:
            current = cells.setdefault(int(marker[2]), [])
    return cells


def _as_json(source: str, old: str) -> str:
    """A source as the JSON value that takes the place of ``old``, in its layout."""
    plain = old.isascii()
    if not old.startswith("["):
        return json.dumps(source, ensure_ascii=plain)
    lines = [json.dumps(line, ensure_ascii=plain) for line in lines_of(source, keepends=True)]
    layout = re.match(r"\[(\s*)", old)
    before = layout[1] if layout is not None else ""
    after = re.search(r"(\s*)\]$", old)
    separator = f",{before}" if "\n" in before else ", "
    return f"[{before}{separator.join(lines)}{after[1] if after is not None else ''}]"


def _source_spans(text: str) -> Iterator[Span]:
    """Where the ``source`` of each cell stands."""
    cells = dict(_members(text, _skip(text, 0)))["cells"]
    for cell in _items(text, cells.start):
        yield dict(_members(text, cell.start)).get("source", Span(0, 0))


def _members(text: str, at: int) -> Iterator[tuple[str, Span]]:
    """The names and values of the object at a place."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        _, end = DECODER.raw_decode(text, at)
        yield name, Span(at, end)
        at = _next(text, end)


def _items(text: str, at: int) -> Iterator[Span]:
    """The elements of the list at a place."""
    at = _skip(text, at + 1)
    while text[at] != "]":
        _, end = DECODER.raw_decode(text, at)
        yield Span(at, end)
        at = _next(text, end)


def _next(text: str, at: int) -> int:
    """The place of what follows a value, after a comma if there is one."""
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    match = BLANK.match(text, at)
    return match.end() if match is not None else at
