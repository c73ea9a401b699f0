"""Comments that tell what a migration left to the reader."""

from __future__ import annotations

from typing import TypeVar

import libcst as cst

from ampcompat.migrate.result import MARK

Statement = TypeVar("Statement", bound=cst.BaseStatement)


def marked(statement: Statement, message: str) -> Statement:
    """``statement`` with a TODO comment above it, once."""
    lines: list[cst.EmptyLine] = list(getattr(statement, "leading_lines", ()))
    comment = MARK + message
    if any(line.comment is not None and line.comment.value == comment for line in lines):
        return statement
    new = cst.EmptyLine(comment=cst.Comment(comment))
    return statement.with_changes(leading_lines=[*lines, new])


def code_of(node: cst.CSTNode) -> str:
    """The source text of a node."""
    return cst.Module([]).code_for_node(node)
