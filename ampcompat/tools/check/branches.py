"""Whether two statements of a function can run in one iteration, as the ``if`` statements around them tell."""

from __future__ import annotations

import ast

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import SCOPES, Source, once

LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
EXITS = ("exit", "quit", "sys.exit", "os._exit")
#: The text of a test, and whether it holds.
Condition = tuple[str, bool]


def exclusive(source: Source, earlier: ast.AST, later: ast.AST) -> bool:
    """Whether ``later`` does not run in an iteration in which ``earlier`` has run."""
    return _leaves_before(source, earlier, later) or contradict(source, earlier, later)


def contradict(source: Source, first: ast.AST, second: ast.AST) -> bool:
    """Whether the tests around one node, read as text, rule out those around another, perhaps of another function."""
    known = conditions(source, second)
    return any((test, not holds) in known for test, holds in conditions(source, first))


def has_alternative(source: Source, node: ast.AST) -> bool:
    """Whether an ``if`` of its function may run something else in the place of ``node``."""
    for child, parent in source.around(node):
        if isinstance(parent, SCOPES):
            return False
        if isinstance(parent, ast.If) and parent.orelse:
            return True
        place = source.place(child)
        earlier = [] if place is None else place.block[: place.position]
        if any(isinstance(statement, ast.If) and _leaves(statement.body[-1]) for statement in earlier):
            return True
    return False


@once
def conditions(source: Source, node: ast.AST) -> frozenset[Condition]:
    """The tests of the ``if`` statements around ``node`` in its function."""
    found: set[Condition] = set()
    for child, parent in source.around(node):
        if isinstance(parent, ast.If):
            found |= _of_test(source, parent.test, source.field(child) == "body")
        if isinstance(parent, SCOPES):
            break
    return frozenset(found)


@once
def _of_test(source: Source, test: ast.expr, holds: bool) -> set[Condition]:
    """What follows from a test that holds or does not, as a whole and in its parts."""
    return {(ast.unparse(test), holds), *_parts(test, holds)}


def _parts(test: ast.expr, holds: bool) -> set[Condition]:
    """What follows from a test: its negations resolved (``not a``, ``a != b``), and the parts of a conjunction."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _parts(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is holds:
        return {condition for part in test.values for condition in _parts(part, holds)}
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        if isinstance(test.ops[0], ast.NotEq | ast.IsNot | ast.NotIn):
            return {(f"{left} == {right}", not holds)}
        if isinstance(test.ops[0], ast.Eq | ast.Is | ast.In):
            return {(f"{left} == {right}", holds)}
    return {(ast.unparse(test), holds)}


def _leaves_before(source: Source, earlier: ast.AST, later: ast.AST) -> bool:
    """Whether a branch that holds ``earlier`` ends the iteration, and ``later`` stands below that branch."""
    around_later = set(source.ancestors(later))
    for child, parent in source.around(earlier):
        if isinstance(parent, SCOPES):
            return False
        place = source.place(child)
        if isinstance(parent, ast.If) and parent not in around_later and place is not None and _leaves(place.block[-1]):
            return True
    return False


def _leaves(last: ast.stmt) -> bool:
    """Whether a statement ends the function, the iteration or the process."""
    if isinstance(last, LEAVES):
        return True
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and dotted(last.value.func) in EXITS
