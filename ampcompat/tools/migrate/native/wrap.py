"""New lines that are longer than those of the file: the arguments of their last call go on lines of their own."""

from __future__ import annotations

from collections.abc import Collection

from ampcompat.tools.check.lines import indent_of, lines_of

#: Lines of this length are not too long in any file.
USUAL = 100


def wrap_long_lines(code: str, old_lines: Collection[str], newline: str) -> str:
    """A source whose long lines are wrapped, but for those that it had before.

    Args:
        code: The source.
        old_lines: The lines that it had, which say how long its lines may be.
        newline: What ends its lines.
    """
    longest = max(USUAL, *map(len, old_lines)) if old_lines else USUAL
    found = []
    for line in lines_of(code, keepends=True):
        text = line.rstrip("\r\n")
        if len(text) > longest and text not in old_lines and "#" not in text:
            line = newline.join(_wrapped(text, longest)) + line[len(text) :]
        found.append(line)
    return "".join(found)


def _wrapped(line: str, longest: int) -> list[str]:
    """The lines of a statement that ends with a call; the statement as it is where it does not."""
    opening, commas = _last_brackets(line)
    if opening < 1 or not (line[opening - 1].isalnum() or line[opening - 1] in "_])"):
        return [line]
    indent = indent_of(line)
    inner = indent + "    "
    together = inner + line[opening + 1 : -1]
    if not together.strip():
        return [line]
    if len(together) <= longest:
        return [line[: opening + 1], together, f"{indent})"]
    starts = [opening, *commas]
    ends = [*commas, len(line) - 1]
    arguments = [line[start + 1 : end].strip() for start, end in zip(starts, ends, strict=True)]
    if len(arguments) == 1:  # a comma behind a generator expression would be wrong
        return [line[: opening + 1], together, f"{indent})"]
    return [line[: opening + 1], *(f"{inner}{argument}," for argument in arguments), f"{indent})"]


def _last_brackets(line: str) -> tuple[int, list[int]]:
    """Where the bracket opens that the line ends with, and the commas directly in it; -1 where there is none."""
    opened: list[tuple[int, list[int]]] = []
    closed: tuple[int, list[int]] = (-1, [])
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote and line[place - 1] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            opened.append((place, []))
        elif letter in ")]}" and opened:
            closed = opened.pop()
        elif letter == "," and opened:
            opened[-1][1].append(place)
    whole = not opened and not quote and line.endswith(")")
    return closed if whole else (-1, [])
