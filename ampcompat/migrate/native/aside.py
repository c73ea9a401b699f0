"""Set aside what a translation does not change: libcst, which is slow, sees a comment for each of its lines.

Functions, classes and methods that name nothing of apex, step nothing, read no gradients and run no forward stay as
they are. Their lines keep their numbers, so that positions of the whole text hold in the shortened one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from ampcompat.check.lines import lines_of
from ampcompat.check.source import Source
from ampcompat.migrate.casts import READS_GRADIENTS
from ampcompat.migrate.objects import FUNCTIONS

LABEL = "#ampcompat-aside"
ASIDE = re.compile(rf"^[ \t]*{LABEL} (\d+)[ \t]*(?:\r\n|\r|\n|\Z)", re.MULTILINE)
TOUCHING = frozenset({"step", "backward", "master_params"})


class Lost(Exception):
    """A line that was set aside did not come back: it was a comment of something that went."""


class Aside:
    """A text without some of its statements.

    Args:
        source: The file.
        needs: Statements that the translation will change.
        everything: Show all of it.

    Attributes:
        code: The text with a comment in the place of each line that is set aside.
        shown: Whether a line, from 1, is in it.
    """

    def __init__(self, source: Source, needs: Collection[ast.AST] = (), everything: bool = False) -> None:
        self.lines = lines_of(source.code, keepends=True)
        self.hidden: list[int] = []
        new = list(self.lines)
        for first, last in () if everything or LABEL in source.code else _unwanted(source, needs):
            indent = self.lines[first - 1][: -len(self.lines[first - 1].lstrip(" \t"))]
            for number in range(first, last + 1):
                end = self.lines[number - 1]
                new[number - 1] = f"{indent}{LABEL} {number}" + end[len(end.rstrip("\r\n")) :]
                self.hidden.append(number)
        self.code = "".join(new)
        self._set = frozenset(self.hidden)

    def shown(self, line: int) -> bool:
        """Whether a line is in the text."""
        return line not in self._set

    def restored(self, code: str) -> str:
        """``code``, made of this text, with the lines that were set aside.

        Raises:
            Lost: Some are not in ``code``, or not in order.
        """
        if [int(number) for number in ASIDE.findall(code)] != self.hidden:
            raise Lost
        return ASIDE.sub(lambda found: self.lines[int(found[1]) - 1], code)


def _unwanted(source: Source, needs: Collection[ast.AST]) -> Iterator[tuple[int, int]]:
    """First and last lines of the statements that stay as they are, in order."""
    wanted: set[ast.AST] = set()
    for node in source.nodes:
        if node not in wanted and (node in needs or _is_touched(node, source.bindings.heads)):
            wanted.update((node, *source.ancestors(node)))
    for part in source.tree.body:
        if not isinstance(part, (*FUNCTIONS, ast.ClassDef)):
            continue
        if part not in wanted:
            yield _lines(part)
        elif isinstance(part, ast.ClassDef):
            # A class keeps one statement at least.
            methods = [node for node in part.body if isinstance(node, FUNCTIONS) and node not in wanted]
            if len(methods) < len(part.body):
                yield from map(_lines, methods)


def _lines(part: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[int, int]:
    return min([part.lineno, *(d.lineno for d in part.decorator_list)]), part.end_lineno or part.lineno


def _is_touched(node: ast.AST, heads: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in TOUCHING or READS_GRADIENTS.search(node.attr) is not None
    if isinstance(node, ast.Name):
        return node.id in heads or node.id in TOUCHING or READS_GRADIENTS.search(node.id) is not None
    return isinstance(node, ast.Import | ast.ImportFrom)
