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


def settled(module: cst.Module) -> cst.Module:
    """``module`` without the marks that its first statement got again.

    libcst keeps comments above the first statement with the module, so that statement cannot know them.
    """
    known = {line.comment.value for line in module.header if line.comment is not None}
    if not module.body or not hasattr(module.body[0], "leading_lines"):
        return module
    first = module.body[0]
    lines = [n for n in first.leading_lines if n.comment is None or n.comment.value not in known]
    return module.with_changes(body=[first.with_changes(leading_lines=lines), *module.body[1:]])


def code_of(node: cst.CSTNode) -> str:
    """The source text of a node."""
    return cst.Module([]).code_for_node(node)
