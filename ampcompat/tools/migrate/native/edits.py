"""Changes to a tree: collected by the rules while they read it, and made in one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import libcst as cst

from ampcompat.tools.migrate.native.file import File, Pruned
from ampcompat.tools.migrate.result import MARK

#: Stands for the scaler in code that is written before its name is known.
SCALER = "__scaler__"
Statement = cst.BaseStatement | cst.BaseSmallStatement
#: What makes the new expression, or statements, of a node in which the edits are made: of the same type as it was.
Replacement = Callable[[Any], cst.CSTNode]
Statements = Callable[[Any], Sequence[Statement]]


class Edits:
    """What becomes of the nodes of one tree.

    Attributes:
        expressions: New expressions, made from the node after the edits inside of it.
        statements: For a statement those that take its place, as functions of the edited one.
        before: Code that is put before a statement.
        after: Code that is put after a statement.
        marks: Messages for the reader of a statement.
        notes: What the reader should know and need not act on.
    """

    def __init__(self) -> None:
        self.expressions: dict[cst.CSTNode, Replacement] = {}
        self.statements: dict[cst.CSTNode, Statements] = {}
        self.before: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)
        self.after: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)
        self.marks: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)
        self.notes: list[str] = []

    def replace(self, expression: cst.CSTNode, code: str) -> None:
        """Put code in the place of an expression."""
        self.expressions[expression] = lambda _: cst.parse_expression(code)

    def insert_before(self, statement: cst.CSTNode, code: str) -> None:
        """Put code before a statement, once."""
        if code not in self.before[statement]:
            self.before[statement].append(code)

    def insert_after(self, statement: cst.CSTNode, code: str) -> None:
        """Put code after a statement, once."""
        if code not in self.after[statement]:
            self.after[statement].append(code)

    def mark(self, statement: cst.CSTNode, message: str) -> None:
        """Put a comment for the reader above a statement, once."""
        if message not in self.marks[statement]:
            self.marks[statement].append(message)

    def note(self, message: str) -> None:
        """Say something beside the code, once."""
        if message not in self.notes:
            self.notes.append(message)

    def apply(self, file: File) -> cst.Module:
        """The tree of the file with the edits made."""
        for node in list(self.marks):
            # A comment above ``if x: statement`` is one above the ``if``.
            if isinstance(file.parents.get(node), cst.SimpleStatementSuite):
                for message in self.marks.pop(node):
                    self.mark(file.line_of(node), message)
        known = [node for node in self.marks if is_marked(file.line_of(node), file)]
        for node in known:
            del self.marks[node]
        changed = [*self.expressions, *self.statements, *self.before, *self.after, *self.marks]
        return file.module.visit(_Apply(file, changed, self)) if changed else file.module


def is_marked(statement: cst.CSTNode, file: File) -> bool:
    """Whether a statement has a mark above it."""
    lines = list(getattr(statement, "leading_lines", ()))
    if file.module.body and statement is file.module.body[0]:
        lines += file.module.header
    return any(line.comment is not None and line.comment.value.startswith(MARK) for line in lines)


class _Apply(Pruned):
    def __init__(self, file: File, changed: Iterable[cst.CSTNode], edits: Edits) -> None:
        super().__init__(file, changed)
        self.edits = edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        edits = self.edits
        updated = super().on_leave(original_node, updated_node)
        if original_node in edits.expressions and isinstance(updated, cst.CSTNode):
            return edits.expressions[original_node](updated)
        if isinstance(original_node, cst.SimpleStatementLine) and isinstance(updated, cst.SimpleStatementLine):
            return self._line(original_node, updated)
        if isinstance(original_node, cst.SimpleStatementSuite) and isinstance(updated, cst.SimpleStatementSuite):
            return updated.with_changes(body=self._one_line(original_node.body, updated.body))
        if isinstance(original_node, cst.BaseCompoundStatement) and isinstance(updated, cst.BaseCompoundStatement):
            return self._compound(original_node, updated)
        return updated

    def _line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        marks = [*self.edits.marks.get(original, ()), *(m for s in original.body for m in self.edits.marks.get(s, ()))]
        if len(original.body) > 1:
            small = self._one_line(original.body, updated.body)
            return _with_marks(updated.with_changes(body=small), marks)
        parts = self._parts(original.body[0], updated.body[0])
        if len(parts) == 1 and parts[0] is updated.body[0] and not marks:
            return updated
        bare = updated.with_changes(leading_lines=())
        lines = [s if isinstance(s, cst.BaseStatement) else bare.with_changes(body=[s]) for s in parts]
        return _in_place_of(updated, _with_end_of(updated, lines), marks)

    def _parts(self, original: cst.CSTNode, updated: cst.BaseSmallStatement) -> list[Statement]:
        edits = self.edits
        parts: list[Statement] = [_parsed(code) for code in edits.before.get(original, ())]
        if original in edits.statements:
            parts += edits.statements[original](updated)
        else:
            parts.append(updated)
        return [*parts, *(_parsed(code) for code in edits.after.get(original, ()))]

    def _one_line(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement]
    ) -> list[cst.BaseSmallStatement]:
        """The statements of a line that holds several, with what is put between them."""
        found: list[cst.BaseSmallStatement] = []
        for old, new in zip(original, updated, strict=True):
            for part in self._parts(old, new):
                small = part.body if isinstance(part, cst.SimpleStatementLine) else [part]
                found += [s for s in small if isinstance(s, cst.BaseSmallStatement)]
        if not found:
            found = [cst.Pass()]
        space = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
        return [s.with_changes(semicolon=space) for s in found[:-1]] + [
            found[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        ]

    def _compound(
        self, original: cst.BaseCompoundStatement, updated: cst.BaseCompoundStatement
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        edits = self.edits
        own = edits.statements[original](updated) if original in edits.statements else [updated]
        lines = [
            *(_parsed(code) for code in edits.before.get(original, ())),
            *(s if isinstance(s, cst.BaseStatement) else cst.SimpleStatementLine([s]) for s in own),
            *(_parsed(code) for code in edits.after.get(original, ())),
        ]
        return _in_place_of(updated, lines, edits.marks.get(original, ()))


def _with_end_of(old: cst.SimpleStatementLine, lines: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """``lines`` with the comment at the end of ``old`` at the end of the first that took its place."""
    found = False
    kept: list[cst.BaseStatement] = []
    for line in lines:
        own = isinstance(line, cst.SimpleStatementLine) and line.trailing_whitespace is old.trailing_whitespace
        if own and found:
            line = line.with_changes(trailing_whitespace=cst.TrailingWhitespace())
        found = found or own
        kept.append(line)
    if not found and kept and isinstance(kept[0], cst.SimpleStatementLine):
        kept[0] = kept[0].with_changes(trailing_whitespace=old.trailing_whitespace)
    return kept


def _parsed(code: str) -> cst.SimpleStatementLine | cst.BaseCompoundStatement:
    return cst.parse_statement(code)


def _in_place_of(
    old: cst.BaseStatement, lines: list[cst.BaseStatement], marks: Sequence[str]
) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
    """``lines`` with the comments that stood above and behind ``old``."""
    if len(lines) == 1 and lines[0] is old and not marks:
        return old
    leading = list(getattr(old, "leading_lines", ()))
    if not lines:
        if any(line.comment is not None for line in leading):
            return cst.FlattenSentinel([])
        return cst.RemoveFromParent()
    lines = list(lines)
    if lines[0] is not old:
        lines[0] = lines[0].with_changes(leading_lines=[*leading, *getattr(lines[0], "leading_lines", ())])
        lines = [lines[0], *(_bare(line) if line is old else line for line in lines[1:])]
    lines[0] = _with_marks(lines[0], marks)
    return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)


def _bare(statement: cst.BaseStatement) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=())


def _with_marks(statement: cst.BaseStatement, marks: Sequence[str]) -> cst.BaseStatement:
    lines: list[cst.EmptyLine] = list(getattr(statement, "leading_lines", ()))
    known = {line.comment.value for line in lines if line.comment is not None}
    new = [cst.EmptyLine(comment=cst.Comment(MARK + m)) for m in marks if MARK + m not in known]
    return statement.with_changes(leading_lines=[*lines, *new]) if new else statement
