"""Whether two statements of a file run in one execution: what the tests around them say."""

from __future__ import annotations

import ast
import re

from ampcompat.check.source import SCOPES, Source, text

# A branch for using a model, not for training one.
EVALUATES = re.compile(r"eval|test|infer|valid|predict|deploy|export|demo|generat", re.IGNORECASE)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
Condition = tuple[str, bool]


def conditions(source: Source, node: ast.AST) -> set[Condition]:
    """The tests that hold where ``node`` runs: those around it, and those of branches above that leave."""
    found: set[Condition] = set()
    child = node
    for parent in source.ancestors(node):
        if isinstance(parent, ast.If):
            if child in parent.body:
                found |= _parts(parent.test, True)
            elif child in parent.orelse:
                found |= _parts(parent.test, False)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                for above in block[: block.index(child)]:
                    if isinstance(above, ast.If) and leaves(above.body) and not above.orelse:
                        found |= _parts(above.test, False)
        if isinstance(parent, SCOPES):
            break
        child = parent
    return found


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a branch ends the function, the loop's turn or the process."""
    last = body[-1]
    if isinstance(last, LEAVES):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("exit", "quit", "sys.exit", "os._exit")


def _parts(test: ast.expr, holds: bool) -> set[Condition]:
    """A test as conditions with its negations resolved (``not a``, ``a != b``); a conjunction is several."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _parts(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And)
        return (
            {p for part in test.values for p in _parts(part, holds)} if every is holds else {(ast.unparse(test), holds)}
        )
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        op, left, right = test.ops[0], ast.unparse(test.left), ast.unparse(test.comparators[0])
        if isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn):
            return {(f"{left} == {right}", not holds)}
        if isinstance(op, ast.Eq | ast.Is | ast.In):
            return {(f"{left} == {right}", holds)}
    return {(ast.unparse(test), holds)}


def exclusive(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether some test has to hold for one statement and must not for the other."""
    first, second = conditions(source, one), conditions(source, other)
    return any((test, not holds) in second for test, holds in first) or _sides(source, one, other)


def _sides(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether they are on different sides of one ``if`` or ``try``."""
    above = [other, *source.ancestors(other)]
    child = one
    for parent in source.ancestors(one):
        if isinstance(parent, ast.If | ast.Try) and parent in above:
            inside = above[above.index(parent) - 1]
            mine = child in parent.body
            return mine is not (inside in parent.body)
        child = parent
    return False


def rebound(source: Source, name: str, first: ast.AST, second: ast.AST) -> bool:
    """Whether ``name`` may mean another object where ``second`` runs than the one that ``first`` gave it.

    ``net = net.cuda()`` and ``net = prepare(net)`` go on with it, ``net = Other()`` and ``net = net.module`` do not.
    """
    start, end = getattr(first, "lineno", 0), getattr(second, "lineno", 0)
    for node in source.kind(ast.Assign):
        if not start < node.lineno < end or source.scope(node) is not source.scope(second):
            continue
        if name not in map(text, (n for target in node.targets for n in ast.walk(target))):
            continue
        if text(node.value) == f"{name}.module" or name not in map(text, ast.walk(node.value)):
            return True
    return False


def certain(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether one of two statements runs in every execution in which the other does."""
    first, second = conditions(source, one), conditions(source, other)
    return first <= second or second <= first


def evaluates(source: Source, node: ast.AST) -> bool:
    """Whether a statement is in a branch or function for evaluation, or in a branch that leaves before training."""
    child = node
    for parent in source.ancestors(node):
        branch = parent if isinstance(parent, ast.If) and child in parent.body else None
        if branch is not None and (leaves(branch.body) or EVALUATES.search(ast.unparse(branch.test))):
            return True
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and EVALUATES.search(parent.name):
            return True
        child = parent
    return False
