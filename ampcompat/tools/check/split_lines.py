"""Split text into lines as Python's tokenizer does: ``str.splitlines`` breaks at form feeds and others, too."""

from __future__ import annotations

import re

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def lines_of(text: str, keepends: bool = False) -> list[str]:
    """The lines of ``text``; what ends one is a line feed, a carriage return, or both."""
    found = LINE.findall(text)
    return found if keepends else [line.rstrip("\r\n") for line in found]


def indent_of(line: str) -> str:
    """The blanks that a line begins with; a form feed is not one."""
    return line[: len(line) - len(line.lstrip(" \t"))]
