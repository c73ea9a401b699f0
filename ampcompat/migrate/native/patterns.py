"""Recognising apex calls in a libcst tree."""

from __future__ import annotations

import functools

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.migrate.marks import code_of


def symbol(node: cst.CSTNode, bindings: Bindings) -> str | None:
    """The apex symbol that a name or a chain of attributes means, or None."""
    root = node
    while isinstance(root, cst.Attribute):
        root = root.value
    return bindings.resolve(code_of(node)) if isinstance(root, cst.Name) else None


def scaled_call(node: cst.CSTNode, bindings: Bindings) -> cst.Call | None:
    """The ``amp.scale_loss(...)`` of a with-statement that has no other item."""
    if not isinstance(node, cst.With) or len(node.items) != 1:
        return None
    call = node.items[0].item
    if isinstance(call, cst.Call) and symbol(call.func, bindings) == "apex.amp.scale_loss" and len(call.args) >= 2:
        return call
    return None


def holds_statements(node: cst.CSTNode) -> bool:
    """Whether a statement may be inside ``node``: a visitor of statements need not look into the others."""
    return _may_hold(node.__class__)


@functools.cache
def _may_hold(kind: type[cst.CSTNode]) -> bool:
    # libcst's bases are abstract classes: asking them for each node costs more than the visit.
    return not issubclass(kind, LEAVES)


LEAVES = (
    cst.BaseExpression, cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.Arg, cst.Parameters, cst.WithItem,
    cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Decorator, cst.Comment, cst.Newline,
)  # fmt: skip


def is_layout(node: cst.CSTNode) -> bool:
    """Whether ``node`` is white space, a comment or punctuation: nothing to look into."""
    return _is_layout(node.__class__)


@functools.cache
def _is_layout(kind: type[cst.CSTNode]) -> bool:
    return issubclass(kind, LAYOUT)


LAYOUT = (
    cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Comment, cst.Newline, cst.Comma,
    cst.Colon, cst.Dot, cst.AssignEqual, cst.Semicolon, cst.LeftParen, cst.RightParen,
)  # fmt: skip


class _Blocks(cst.CSTVisitor):
    def on_visit(self, node: cst.CSTNode) -> bool:
        return holds_statements(node) and super().on_visit(node)

    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.found: list[cst.With] = []

    def visit_With(self, node: cst.With) -> None:
        if scaled_call(node, self.bindings) is not None:
            self.found.append(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False


@functools.lru_cache(maxsize=10_000)
def contains_scaled(node: cst.CSTNode, bindings: Bindings) -> tuple[cst.With, ...]:
    """``amp.scale_loss`` blocks in a statement, itself included, nested functions left out."""
    visitor = _Blocks(bindings)
    node.visit(visitor)
    return tuple(visitor.found)


def receiver(call: cst.Call) -> str:
    """Return what a method is called on, in the quotes of ``ast.unparse``; "" for other calls."""
    return code_of(call.func.value).replace('"', "'") if isinstance(call.func, cst.Attribute) else ""


class _Uses(cst.CSTVisitor):
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.found: list[str] = []

    def _see(self, node: cst.CSTNode) -> bool:
        name = symbol(node, self.bindings)
        if name is not None:
            self.found.append(name)
        return name is None

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        # The attribute's own name (`x.amp`) is no mention of `amp`: only the value is looked at.
        if self._see(node):
            node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> bool:
        return self._see(node)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        for part in (node.default, node.annotation):
            if part is not None:
                part.visit(self)
        return False


def uses(node: cst.CSTNode, bindings: Bindings) -> list[str]:
    """Apex symbols mentioned in a node, import statements left out."""
    visitor = _Uses(bindings)
    node.visit(visitor)
    return visitor.found


def header(statement: cst.CSTNode) -> cst.CSTNode:
    """A compound statement without its blocks: what stands on its first line."""
    empty = cst.SimpleStatementSuite([cst.Pass()])
    if isinstance(statement, cst.If):
        return statement.with_changes(body=empty, orelse=None)
    if isinstance(statement, cst.For | cst.While):
        return statement.with_changes(body=empty, orelse=None)
    if isinstance(statement, cst.Try | cst.TryStar | cst.Match):
        return cst.Pass()
    if isinstance(statement, cst.BaseCompoundStatement):
        return statement.with_changes(body=empty)
    return statement
