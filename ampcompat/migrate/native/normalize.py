"""Give statements that will be rewritten lines of their own: ``a; opt.step()``, ``if c: opt.step()``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.patterns import uses

TOUCHED = re.compile(r"\.step\(|\.backward\(|\bclip_grad|\.grad\b")
Line = cst.SimpleStatementLine


def split_lines(module: cst.Module, bindings: Bindings, models: Sequence[str]) -> cst.Module:
    """``module`` with such lines split; others stay."""
    calls = "|".join(re.escape(model) + r"\(" for model in models)
    touched = re.compile(f"{TOUCHED.pattern}|{calls}") if calls else TOUCHED
    return module.visit(_Split(bindings, touched))


class _Split(cst.CSTTransformer):
    def __init__(self, bindings: Bindings, touched: re.Pattern[str]) -> None:
        self.bindings, self.touched = bindings, touched

    def _is_touched(self, node: cst.CSTNode) -> bool:
        return self.touched.search(code_of(node)) is not None or bool(uses(node, self.bindings))

    def leave_SimpleStatementLine(self, original_node: Line, updated_node: Line) -> Line | cst.FlattenSentinel[Line]:
        if len(original_node.body) < 2 or not self._is_touched(original_node):
            return updated_node
        lines = [Line([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in updated_node.body]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        if not self._is_touched(original_node):
            return updated_node
        lines = [Line([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in updated_node.body]
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.IndentedBlock(lines)
