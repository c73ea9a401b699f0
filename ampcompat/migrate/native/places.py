"""Find the lines of each statement of a libcst tree: its own positions come from printing all of it twice over."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

import libcst as cst

from ampcompat.check.source import Source
from ampcompat.migrate.native.patterns import holds_statements

Places = Mapping[cst.CSTNode, tuple[int, int]]


def places(
    module: cst.Module, source: Source, shown: Callable[[int], bool], regions: Mapping[int, tuple[int, int]]
) -> Places:
    """First and last line of each statement of ``module``.

    Args:
        module: The tree of ``source``, without some of its lines.
        source: The text.
        shown: Whether a line is in ``module``.
        regions: The first and last line of what is under a ``with`` that ``source`` does not have.
    """
    kept = (node for node in source.nodes if isinstance(node, ast.stmt) and shown(node.lineno))
    visitor = _Places(sorted(kept, key=lambda node: (node.lineno, node.col_offset)), dict(regions))
    module.visit(visitor)
    return visitor.found


class _Places(cst.CSTVisitor):
    """Goes through the statements in the order of the text, as ``ordered`` does."""

    def __init__(self, ordered: list[ast.stmt], regions: dict[int, tuple[int, int]]) -> None:
        self.ordered, self.regions, self.at = ordered, regions, 0
        self.found: dict[cst.CSTNode, tuple[int, int]] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine):
            self._place(node, len(node.body))
        elif isinstance(node, cst.SimpleStatementSuite):  # `if c: a; b` has no lines of its own
            for part in node.body:
                self._place(part, 1)
        elif isinstance(node, cst.With) and (line := self.ordered[self.at].lineno) in self.regions:
            self.found[node] = line, self.regions.pop(line)[1]
        elif isinstance(node, cst.BaseCompoundStatement):
            self._place(node, 1)
        return holds_statements(node)

    def _place(self, node: cst.CSTNode, count: int) -> None:
        first, last = self.ordered[self.at], self.ordered[self.at + count - 1]
        self.found[node] = first.lineno, last.end_lineno or last.lineno
        self.at += count
