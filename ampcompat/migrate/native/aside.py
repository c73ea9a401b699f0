"""Set aside what a translation does not change: libcst, which is slow, sees one comment for each run of statements.

Statements that name nothing of apex, step nothing, read no gradients and run no forward stay as they are, on lines of
their own. Positions are those of the whole text: what libcst is shown is matched to it by the order of statements.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from ampcompat.check.lines import indent_of, lines_of
from ampcompat.check.source import Source
from ampcompat.migrate.casts import READS_GRADIENTS, READS_NONE
from ampcompat.migrate.objects import FUNCTIONS
from ampcompat.migrate.result import MARK

LABEL = "#ampcompat-aside"
ASIDE = re.compile(rf"^([ \t]*){LABEL} (\d+)[ \t]*(?:\r\n|\r|\n|\Z)", re.MULTILINE)
TOUCHING = frozenset({"step", "backward", "master_params", "grad"})
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
#: Statements whose blocks are looked into; the blocks of ``try`` and of ``with amp.scale_loss`` may be moved.
LOOKED_INTO = (*DEFINITIONS, ast.If, ast.For, ast.While, ast.With)
#: Statements that may be dropped, with the comments above them: imports of apex, and a ``try`` around them.
DROPPED = (ast.Import, ast.ImportFrom, ast.Try)
#: Expressions that become statements when they stand alone.
FOLDED = (ast.BoolOp, ast.IfExp, ast.ListComp)


class Lost(Exception):
    """Raised where statements that were set aside do not come back as they were: what they stood at went or moved."""


class Aside:
    """A text without some of its statements.

    Args:
        source: The file.
        needs: Statements that the translation will change.
        everything: Show all of it.

    Attributes:
        lines: The lines of the text; a comment for the first of a run of statements that is set aside, "" for others.
        shown: Whether a line, from 1, is in it.
    """

    def __init__(self, source: Source, needs: Collection[ast.AST] = (), everything: bool = False) -> None:
        self.lines = lines_of(source.code, keepends=True)
        self.runs: list[list[str]] = []
        self._hidden: set[int] = set()
        for first, last in () if everything or LABEL in source.code else _Unwanted(source, needs, self.lines).runs():
            run = self.lines[first - 1 : last]
            end = run[-1][len(run[-1].rstrip("\r\n")) :]
            comment = f"{indent_of(run[0])}{LABEL} {len(self.runs)}{end}"
            self.lines[first - 1 : last] = [comment, *[""] * (last - first)]
            self.runs.append(run)
            self._hidden.update(range(first, last + 1))

    @property
    def code(self) -> str:
        """The text with its comments."""
        return "".join(self.lines)

    def shown(self, line: int) -> bool:
        """Whether a line is in the text."""
        return line not in self._hidden

    def restored(self, code: str) -> str:
        """``code``, made of this text, with the statements that were set aside, as far in as their comments are.

        Raises:
            Lost: Some are not in ``code``, or not in order, or further out.
        """
        if [int(number) for _, number in ASIDE.findall(code)] != [*range(len(self.runs))]:
            raise Lost
        return ASIDE.sub(self._restored, code)

    def _restored(self, comment: re.Match[str]) -> str:
        run = self.runs[int(comment[2])]
        indent = indent_of(run[0])
        if not comment[1].endswith(indent):
            raise Lost
        return "".join(indented(run, comment[1].removesuffix(indent)))


def indented(lines: Sequence[str], unit: str) -> list[str]:
    """``lines`` with ``unit`` in front, blank ones as they are."""
    return [unit + line if line.strip() else line for line in lines]


class _Unwanted:
    """The statements that no translation changes.

    Attributes:
        shown: The other nodes: what a translation may change, calls of functions that hold such a thing, statements
            that share a line, and everything around these.
    """

    def __init__(self, source: Source, needs: Collection[ast.AST], lines: Sequence[str]) -> None:
        self.source, self.lines = source, lines
        self.heads = source.bindings.heads
        self.shown: set[ast.AST] = set()
        for node in source.nodes:
            if node in needs or _is_touched(node, self.heads):
                self._show(node)
        named = {node.name for node in self.shown if isinstance(node, FUNCTIONS)}
        starts: set[int] = set()
        for node in source.nodes:
            word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            folded = isinstance(node, ast.Expr) and isinstance(node.value, FOLDED)
            if word in named or folded or (isinstance(node, ast.stmt) and node.lineno in starts):
                self._show(node)
            if isinstance(node, ast.stmt):
                starts.add(node.lineno)

    def _show(self, node: ast.AST) -> None:
        while node not in self.shown:
            self.shown.add(node)
            node = self.source.parents.get(node, node)

    def runs(self) -> list[tuple[int, int]]:
        """First and last line of each run, in order."""
        body = self.source.tree.body
        # An import of torch is put above the first import, and what stands above that is its comment.
        first = next((i for i, part in enumerate(body) if isinstance(part, ast.Import | ast.ImportFrom)), len(body))
        blocks: list[Sequence[ast.stmt]] = [[part] for part in body[: first + 1] if isinstance(part, DEFINITIONS)]
        return sorted(run for block in (*blocks, body[first + 1 :]) for run in self._block(block, keep=False))

    def _block(self, body: Sequence[ast.stmt], keep: bool = True) -> Iterator[tuple[int, int]]:
        """The runs of a block; at least one statement of it is shown that is not dropped."""
        free = [self._is_free(part, after) for part, after in zip(body, [*body[1:], None], strict=False)]
        if keep and all(hidden or isinstance(part, DROPPED) for part, hidden in zip(body, free, strict=True)):
            free = [hidden and part is not body[-1] for part, hidden in zip(body, free, strict=True)]
        run: tuple[int, int] | None = None
        for part, hidden in zip(body, free, strict=True):
            first, last = self._lines(part)
            if hidden:
                run = (run[0] if run is not None else self._with_marks(first), last)
                continue
            if run is not None:
                yield run
                run = None
            if part in self.shown:
                yield from self._inside(part)
        if run is not None:
            yield run

    def _inside(self, part: ast.stmt) -> Iterator[tuple[int, int]]:
        if not isinstance(part, LOOKED_INTO):
            return
        if isinstance(part, ast.With) and any(self._names_apex(item) for item in part.items):
            return
        yield from self._block(part.body)
        other = getattr(part, "orelse", [])
        if len(other) == 1 and self.lines[other[0].lineno - 1].lstrip().startswith("elif"):
            yield from self._inside(other[0])
        else:
            yield from self._block(other)

    def _names_apex(self, item: ast.withitem) -> bool:
        return any(isinstance(node, ast.Name) and node.id in self.heads for node in ast.walk(item))

    def _is_free(self, part: ast.stmt, after: ast.stmt | None) -> bool:
        """Whether a statement can be set aside: it has its lines for itself, and what follows is not dropped."""
        if part in self.shown or isinstance(after, DROPPED):
            return False
        first, last = self._lines(part)
        alone = not self.lines[first - 1][: part.col_offset].strip() or isinstance(part, DEFINITIONS)
        return alone and (after is None or self._lines(after)[0] > last)

    def _with_marks(self, line: int) -> int:
        """The line of the first mark right above ``line``: set aside with its statement, it is not the next one's."""
        while line > 1 and self.lines[line - 2].lstrip().startswith(MARK):
            line -= 1
        return line

    def _lines(self, part: ast.stmt) -> tuple[int, int]:
        decorators: list[ast.expr] = getattr(part, "decorator_list", [])
        return min([part.lineno, *(d.lineno for d in decorators)]), part.end_lineno or part.lineno


def _is_touched(node: ast.AST, heads: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_concerned(node.attr)
    if isinstance(node, ast.Name):
        return node.id in heads or _is_concerned(node.id)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_concerned(word: str) -> bool:
    """Whether a name may be that of a step or backward pass, of gradients, or of what reads them."""
    if word in TOUCHING:
        return True
    return READS_GRADIENTS.search(word) is not None and READS_NONE.search(word) is None
