"""Give steps and calls of amp statements of their own.

``a; opt.step()``, ``if c: opt.step()``, ``c and opt.step()``, ``opt.step() if c else None``, and comprehensions of
steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.check.source import Source
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.patterns import uses

TOUCHED = re.compile(r"\.step\(|\.backward\(|\bclip_grad|\.grad\b")
Line = cst.SimpleStatementLine


def split_lines(module: cst.Module, source: Source, models: Sequence[str]) -> cst.Module:
    """``module`` with such lines split; others stay."""
    calls = "|".join(re.escape(model) + r"\(" for model in models)
    touched = re.compile(f"{TOUCHED.pattern}|{calls}") if calls else TOUCHED
    return module.visit(_Split(source.bindings, touched))


def has_shared_lines(source: Source) -> bool:
    """Whether there is anything to split: most files have none, and a visit costs more than this look."""
    seen: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.stmt):
            folded = isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp | ast.IfExp | ast.ListComp)
            if node.lineno in seen or folded:
                return True
            seen.add(node.lineno)
    return False


class _Split(cst.CSTTransformer):
    def __init__(self, bindings: Bindings, touched: re.Pattern[str]) -> None:
        self.bindings, self.touched = bindings, touched

    def _is_touched(self, node: cst.CSTNode) -> bool:
        return self.touched.search(code_of(node)) is not None or bool(uses(node, self.bindings))

    def leave_SimpleStatementLine(
        self, original_node: Line, updated_node: Line
    ) -> cst.BaseStatement | cst.FlattenSentinel[Line]:
        if not self._is_touched(original_node):
            return updated_node
        if len(original_node.body) < 2:
            return _unfolded(updated_node)
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


def _unfolded(line: Line) -> cst.BaseStatement:
    """A conditional expression or comprehension that stands for a statement, as that statement."""
    part = line.body[0]
    value = part.value if isinstance(part, cst.Expr) else None
    if isinstance(value, cst.BooleanOperation) and isinstance(value.operator, cst.And):
        made: cst.BaseStatement = cst.If(_bare(value.left), _block(value.right))
    elif isinstance(value, cst.BooleanOperation):
        made = cst.If(cst.UnaryOperation(cst.Not(), value.left), _block(value.right))
    elif isinstance(value, cst.IfExp):
        other = value.orelse if isinstance(value.orelse, cst.Call) else None
        made = cst.If(_bare(value.test), _block(value.body), cst.Else(_block(other)) if other is not None else None)
    elif isinstance(value, cst.ListComp) and not value.for_in.ifs and value.for_in.inner_for_in is None:
        made = cst.For(value.for_in.target, value.for_in.iter, _block(value.elt))
    else:
        return line
    return made.with_changes(leading_lines=line.leading_lines)


def _block(value: cst.BaseExpression) -> cst.IndentedBlock:
    return cst.IndentedBlock([Line([cst.Expr(_bare(value))])])


def _bare(value: cst.BaseExpression) -> cst.BaseExpression:
    return value.with_changes(lpar=[], rpar=[]) if getattr(value, "lpar", ()) else value
