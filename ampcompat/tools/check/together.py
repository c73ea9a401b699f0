"""Whether two statements of a file run in one execution: what the tests around them say."""

from __future__ import annotations

import ast
import re

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import SCOPES, TRIES, Source, names_in, once

# A branch for using a model, not for training one.
EVALUATES = re.compile(r"eval|test|infer|valid|predict|deploy|export|demo|generat", re.IGNORECASE)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: A test, and whether it holds.
Condition = tuple[str, bool]


@once
def conditions(source: Source, node: ast.AST) -> frozenset[Condition]:
    """The tests that hold where ``node`` runs: those around it, and those of branches above that leave."""
    found: set[Condition] = set()
    for child, parent in source.around(node):
        place = source.place(child)
        if place is not None:
            if isinstance(parent, ast.If):
                found |= _conjunction(parent.test, place.field == "body")
            for above in place.block[: place.position]:
                if isinstance(above, ast.If) and not above.orelse and leaves(above.body):
                    found |= _conjunction(above.test, False)
        if isinstance(parent, SCOPES):
            break
    return frozenset(found)


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a branch ends the function, the loop's turn or the process."""
    last = body[-1]
    if isinstance(last, LEAVES):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and dotted(call.func) in ("exit", "quit", "sys.exit", "os._exit")


def _conjunction(test: ast.expr, holds: bool) -> set[Condition]:
    """A test as conditions with its negations resolved (``not a``, ``a != b``); a conjunction is several."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _conjunction(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And)
        if every is not holds:
            return {(ast.unparse(test), holds)}
        return {condition for part in test.values for condition in _conjunction(part, holds)}
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        op, left, right = test.ops[0], ast.unparse(test.left), ast.unparse(test.comparators[0])
        if isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn):
            return {(f"{left} == {right}", not holds)}
        if isinstance(op, ast.Eq | ast.Is | ast.In):
            return {(f"{left} == {right}", holds)}
    return {(ast.unparse(test), holds)}


@once
def exclusive(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether some test has to hold for one statement and must not for the other."""
    first, second = conditions(source, one), conditions(source, other)
    return any((test, not holds) in second for test, holds in first) or on_other_sides(source, one, other)


def on_other_sides(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether two statements are on different sides of one ``if`` or ``try``."""
    towards_other = {parent: child for child, parent in source.around(other)}
    for child, parent in source.around(one):
        if isinstance(parent, (ast.If, *TRIES)) and parent in towards_other:
            return (source.field(child) == "body") is not (source.field(towards_other[parent]) == "body")
    return False


def rebound(source: Source, name: str, first: ast.stmt, second: ast.expr) -> bool:
    """Whether ``name`` may mean another object where ``second`` runs than the one that ``first`` gave it.

    ``net = net.cuda()`` and ``net = prepare(net)`` go on with it, ``net = Other()`` and ``net = net.module`` do not.
    """
    lines = _rebindings(source).get((source.scope(second), name), ())
    return any(first.lineno < line < second.lineno for line in lines)


@once
def _rebindings(source: Source) -> dict[tuple[ast.AST, str], list[int]]:
    """The lines on which a name of a scope is given another object."""
    found: dict[tuple[ast.AST, str], list[int]] = {}
    for node in source.kind(ast.Assign):
        used = names_in(node.value)
        for name in set[str]().union(*map(names_in, node.targets)):
            if name not in used or dotted(node.value) == f"{name}.module":
                found.setdefault((source.scope(node), name), []).append(node.lineno)
    return found


def certain(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether one of two statements runs in every execution in which the other does."""
    first, second = conditions(source, one), conditions(source, other)
    return first <= second or second <= first


def evaluates(source: Source, node: ast.AST) -> bool:
    """Whether a statement is in a branch or function for evaluation, or in a branch that leaves before training."""
    return any(_is_for_evaluation(source, child, parent) for child, parent in source.around(node))


def _is_for_evaluation(source: Source, child: ast.AST, parent: ast.AST) -> bool:
    if isinstance(parent, ast.If) and source.field(child) == "body":
        return leaves(parent.body) or EVALUATES.search(ast.unparse(parent.test)) is not None
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return EVALUATES.search(parent.name) is not None
    return False
