"""Changes of a source text: parts of it are replaced, comments put above statements; all else stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampcompat.tools.check.source import Source
from ampcompat.tools.check.split_lines import indent_of, lines_of
from ampcompat.tools.migrate.result import MARK, Result


class Edits:
    """The changes of one source.

    Attributes:
        source: The parsed source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lines = lines_of(source.code, keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._replaced: dict[tuple[int, int], str] = {}
        self._marks: dict[int, list[str]] = {}
        self._notes: list[tuple[int, str]] = []  # each with its offset in the old text
        self._removed: dict[ast.AST, None] = {}
        self.newline = "\r\n" if self._lines and self._lines[0].endswith("\r\n") else "\n"

    def text(self, node: ast.AST) -> str:
        """The source text of a node."""
        start, end = self._span(node)
        return self.source.code[start:end]

    def replace(self, node: ast.AST, text: str) -> None:
        """Put ``text`` in the place of a node."""
        self._replaced[self._span(node)] = text

    def between(self, start: ast.AST, end: ast.AST, before: str, after: str) -> None:
        """Put texts in the place of what stands in ``start`` before and behind ``end``, a node inside of it."""
        first, last = self._span(start)
        inner_first, inner_last = self._span(end)
        self._replaced[first, inner_first] = before
        self._replaced[inner_last, last] = after

    def remove_keyword(self, call: ast.Call, keyword: ast.keyword) -> None:
        """Take an argument out of a call, with one comma."""
        arguments = sorted(map(self._span, [*call.args, *call.keywords]))
        start, end = self._span(keyword)
        position = arguments.index((start, end))
        if position > 0:
            self._replaced[arguments[position - 1][1], end] = ""
        else:
            self._replaced[start, arguments[1][0] if len(arguments) > 1 else end] = ""

    def add_keyword(self, call: ast.Call, text: str) -> None:
        """Put an argument behind the last of a call."""
        arguments = sorted(map(self._span, [*call.args, *call.keywords]))
        end = arguments[-1][1] if arguments else self._span(call)[1] - 1
        self._replaced[end, end] = f", {text}" if arguments else text

    def insert_above(self, node: ast.AST, line: str) -> None:
        """Put a line above the first line of a statement."""
        start = self._starts[self._first_line(node) - 1]
        self._replaced[start, start] = f"{line}{self.newline}"

    def replace_statement(self, node: ast.AST, statements: Sequence[str], left: str = "", message: str = "") -> None:
        """Put statements in the place of one; none at all removes it.

        Args:
            node: The statement.
            statements: What takes its place.
            left: What is left of it, below them, under a mark.
            message: What the mark says.
        """
        if not statements and not left:
            self._removed[node] = None
            return
        if not self._stands_alone(node):
            self.replace(node, "; ".join([*statements, left] if left else statements))
            if message:
                self.mark(node, message)
            return
        marked = [f"{MARK}{message}"] if left and message else []
        marked += [left] if left else []
        indent = indent_of(self._lines[getattr(node, "lineno", 1) - 1])
        self.replace(node, f"{self.newline}{indent}".join([*statements, *marked]))

    def mark(self, node: ast.AST, message: str) -> None:
        """Put a mark above the statement of a node."""
        messages = self._marks.setdefault(self._first_line(self.source.statement(node)), [])
        if message not in messages:
            messages.append(message)

    def note(self, node: ast.AST, message: str) -> None:
        """Keep what differs at a node, and needs no action."""
        start, _ = self._span(node)
        self._notes.append((start, message))

    def apply(self) -> Result:
        """The changed text, with what is left to do in it and the notes."""
        self._remove()
        marks = []
        for line, messages in self._marks.items():
            indent = indent_of(self._lines[line - 1])
            new = [f"{indent}{MARK}{message}{self.newline}" for message in messages]
            known = self._comments_above(line)
            text = "".join(comment for comment in new if comment.strip() not in known)
            marks.append(((self._starts[line - 1], self._starts[line - 1]), text))
        # At one place marks come last, next to their statements.
        changes = sorted([*_outermost(self._replaced).items(), *marks], key=lambda change: change[0])
        code = self.source.code
        for (start, end), text in reversed(changes):
            code = code[:start] + text + code[end:]

        def line_of(offset: int) -> int:
            moved = sum(len(text) - (end - start) for (start, end), text in changes if end <= offset)
            return len(lines_of(code[: offset + moved + 1]))

        return Result.of(code, sorted({(line_of(offset), message) for offset, message in self._notes}))

    def _remove(self) -> None:
        for node in self._removed:
            place = self.source.place(node)
            is_last = place is None or all(other in self._removed for other in place.block)
            if is_last or not self._stands_alone(node):
                self.replace(node, "pass")
            else:
                first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
                self._replaced[self._starts[first - 1], self._starts[last]] = ""

    def _comments_above(self, line: int) -> set[str]:
        found: set[str] = set()
        while line > 1 and self._lines[line - 2].lstrip().startswith("#"):
            line -= 1
            found.add(self._lines[line - 1].strip())
        return found

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends in the text."""
        start = self._offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        return start, self._offset(getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0))

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        # ast counts bytes.
        characters = column if text.isascii() else len(text.encode()[:column].decode())
        return self._starts[line - 1] + characters

    def _stands_alone(self, node: ast.AST) -> bool:
        """Whether nothing but a comment shares the lines of a statement."""
        start, end = self._span(node)
        before = self.source.code[self._starts[getattr(node, "lineno", 1) - 1] : start]
        after = self.source.code[end : self._starts[getattr(node, "end_lineno", 1)]].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def _first_line(self, statement: ast.AST) -> int:
        """The line above which a comment about a statement can stand."""
        line = getattr(statement, "lineno", 1)
        start, _ = self._span(statement)
        if not self.source.code[self._starts[line - 1] : start].strip():
            return line
        place = self.source.place(statement)
        if place is not None and place.position > 0:
            return self._first_line(place.block[place.position - 1])
        parent = self.source.parents.get(statement)
        return self._first_line(self.source.statement(parent)) if parent is not None else line


def _outermost(replaced: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    """Those of the replacements that are not inside of what another replaces."""

    def is_inside(span: tuple[int, int], other: tuple[int, int]) -> bool:
        (start, end), (first, last) = span, other
        return span != other and first <= start < last and first < end <= last

    return {span: text for span, text in replaced.items() if not any(is_inside(span, other) for other in replaced)}
