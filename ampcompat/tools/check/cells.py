"""Read a notebook's cell as IPython does: where it holds no Python there is ``pass``, and the text in a comment.

The rules are those of ``IPython.core.inputtransformer2``, and its magics without ``%``. Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampcompat.tools.check.source import UNPARSABLE, parse
from ampcompat.tools.check.split_lines import indent_of, lines_of

#: Magics of a whole cell that run it as Python; after any other it is text for something else.
PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
#: What no statement of Python begins with: magics, commands, questions, and IPython's calls without parentheses.
ESCAPED = re.compile(r"[ \t]*[%!?,;/]")
#: A line, with those that backslashes add to it.
CONTINUED = re.compile(r"(?:[^\n]*\\\n)*[^\n]*\n?")
#: A part of a statement. Strings and comments go first: what they hold is no bracket and no question.
PART = re.compile(
    r"""(?P<string>
        (?P<quotes>\"{3}|'{3})(?s:(?:[^\\"']+|\\.|.)*?)(?:(?P=quotes)|\Z)
        | "(?:[^"\\\n]|(?s:\\.))*"?
        | '(?:[^'\\\n]|(?s:\\.))*'?
    )
    | (?P<comment>\#[^\n]*)
    | (?P<joined>\\\n)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])
    | (?P<command>=[ \t]*[%!])
    | (?P<question>\?)
    | (?P<end>\n)
    | [^"'#\\()\[\]{}=?\n]+
    | .""",
    re.VERBOSE,
)


@dataclass
class Cell:
    """The Python of a cell.

    Attributes:
        code: A line of Python for each line of the cell.
        shell: What each line has for the shell or for a magic; "" where it is Python.
        problem: Why the cell is left out; None where it is read.
        line: The line that the problem is at, from 0.
    """

    code: list[str] = field(default_factory=list)
    shell: list[str] = field(default_factory=list)
    problem: str | None = None
    line: int = 0

    def add(self, statement: str, is_python: bool) -> None:
        """Add the lines of a statement."""
        for number, line in enumerate(lines_of(statement)):
            passes = "" if number else "pass  "
            self.code.append(line if is_python else f"{indent_of(line)}{passes}# {line.lstrip()}")
            self.shell.append("" if is_python else line)


def read_cell(text: str) -> Cell:
    """The Python of a cell; one that Python does not parse is left out as a whole."""
    lines = lines_of(text)
    written = [line for line in lines if line.strip()]
    first = written[0] if written else ""
    if first.startswith("%%") and not first.startswith(PYTHON_MAGICS):
        return _without_python(lines, lines)
    cell = Cell()
    for statement, is_python in _statements(_dedented(lines, indent_of(first))):
        cell.add(statement, is_python)
    try:
        parse("\n".join(cell.code))
    except UNPARSABLE as problem:
        if len(written) == 1:  # a magic: in a cell of one line it needs no `%`
            return _without_python(lines, lines)
        cell = _without_python(lines, [""] * len(lines))
        cell.problem = problem.msg if isinstance(problem, SyntaxError) else str(problem)
        cell.line = max((getattr(problem, "lineno", None) or 1) - 1, 0)
    return cell


def _without_python(lines: list[str], shell: list[str]) -> Cell:
    return Cell([f"# {line}" for line in lines], shell)


def _dedented(lines: list[str], indent: str) -> str:
    """The lines without the indent of the first one."""
    return "".join(f"{line.removeprefix(indent)}\n" for line in lines)


def _statements(text: str) -> Iterator[tuple[str, bool]]:
    """Each statement with its lines, and whether it is Python."""
    start = 0
    while start < len(text):
        if ESCAPED.match(text, start):
            end, is_python = _end_of_command(text, start), False
        else:
            end, is_python = _end_of_statement(text, start)
        yield text[start:end], is_python
        start = end


def _end_of_command(text: str, start: int) -> int:
    found = CONTINUED.match(text, start)
    return len(text) if found is None else found.end()


def _end_of_statement(text: str, start: int) -> tuple[int, bool]:
    """Where a statement ends, and whether it is Python: not ``files = !ls``, and not ``model?``."""
    depth = 0
    is_python = True
    for part in PART.finditer(text, start):
        kind = part.lastgroup
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
        elif kind == "question":
            is_python = False
        elif kind == "command" and depth == 0:
            return _end_of_command(text, part.start()), False
        elif kind == "end" and depth <= 0:
            return part.end(), is_python
    return len(text), is_python
