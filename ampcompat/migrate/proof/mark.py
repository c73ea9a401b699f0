"""Put marks above the statements that a proof failed for."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ampcompat.check.lines import indent_of, lines_of
from ampcompat.check.source import parse
from ampcompat.migrate.result import MARK

GRADIENTS = "gradients "


def insert(code: str, marks: Iterable[tuple[int, str]]) -> str:
    """``code`` with a comment above the statement at each line, once; a second insertion changes nothing.

    Args:
        code: The source.
        marks: Lines, from 1, and messages.
    """
    marks = list(marks)
    if not marks:
        return code
    lines = lines_of(code, keepends=True)
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    tree = parse(code)
    starts = _starts(tree)
    by_line: dict[int, list[str]] = {}
    for line, message in marks:
        if message.startswith(GRADIENTS) and _is_known(lines, tree, line):
            continue
        notes = by_line.setdefault(max((s for s in starts if s <= line), default=1), [])
        if message not in notes:
            notes.append(message)
    for line in sorted(by_line, reverse=True):
        at = line - 1
        while at > 0 and lines[at - 1].rstrip("\r\n").endswith("\\"):
            at -= 1
        indent = indent_of(lines[at]) if lines else ""
        above = _comments_above(lines, at)
        new = [f"{indent}{MARK}{note}{newline}" for note in by_line[line] if MARK + note not in above]
        lines[at:at] = new
    return "".join(lines)


def _is_known(lines: list[str], tree: ast.Module, line: int) -> bool:
    """Whether the translation itself marked the gradients read at ``line``, or in a statement around it."""
    around = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    return any(c.startswith(MARK + GRADIENTS) for at in around for c in _comments_above(lines, at - 1))


def _starts(tree: ast.Module) -> list[int]:
    """The lines on which a statement begins, decorators included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            decorators = getattr(node, "decorator_list", [])
            found.add(min([node.lineno, *(d.lineno for d in decorators)]))
    return sorted(found)


def _comments_above(lines: list[str], at: int) -> set[str]:
    found = set()
    while at > 0 and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        found.add(lines[at].strip())
    return found
