"""Whether two statements of a file run in one execution: what the tests around them say.

What is asked of one statement is the same for its neighbours, and files may have a hundred thousand of them: answers
are kept by the block that a statement stands in.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import SCOPES, TRIES, Source, text

# A branch for using a model, not for training one.
EVALUATES = re.compile(r"eval|test|infer|valid|predict|deploy|export|demo|generat", re.IGNORECASE)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: Branches of one block that leave, tests around a statement, and contexts of one kind of statement that are looked at:
#: no real file has more.
MOST = 100
#: A test, and whether it holds.
Condition = tuple[str, bool]


class Leaving(NamedTuple):
    """A branch that leaves its block: what holds behind it."""

    position: int
    conditions: frozenset[Condition]


def conditions(source: Source, node: ast.AST) -> frozenset[Condition]:
    """The tests that hold where ``node`` runs: those around it, and those of branches above that leave."""
    key = ("conditions", _context(source, node))
    if key not in source.known:
        source.known[key] = _conditions(source, node)
    found: frozenset[Condition] = source.known[key]
    return found


def _conditions(source: Source, node: ast.AST) -> frozenset[Condition]:
    found: set[Condition] = set()
    child = source.statement(node)
    for parent in source.ancestors(child):
        place = source.place(child)
        if place is not None:
            if isinstance(parent, ast.If):
                found |= _parts(source, parent.test, place.field == "body")
            for leaving in _leaving(source, place.block)[: _leaving_above(source, child)]:
                found |= leaving.conditions
        if isinstance(parent, SCOPES) or len(found) > MOST:
            break
        child = parent
    return frozenset(found)


def _context(source: Source, node: ast.AST) -> Hashable:
    """What all statements share that run under the same conditions: their block, and the branches above that leave."""
    statement = source.statement(node)
    place = source.place(statement)
    return None if place is None else (id(place.block), _leaving_above(source, statement))


def _leaving_above(source: Source, statement: ast.AST) -> int:
    """How many of the leaving branches of a statement's block stand above it."""
    place = source.place(statement)
    if place is None:
        return 0
    return bisect.bisect_left(_leaving(source, place.block), place.position, key=lambda leaving: leaving.position)


def _leaving(source: Source, block: list[ast.stmt]) -> list[Leaving]:
    """The branches of a block that leave it, in order."""
    key = ("leaving", id(block))
    if key not in source.known:
        source.known[key] = [
            Leaving(position, frozenset(_parts(source, statement.test, False)))
            for position, statement in enumerate(block)
            if isinstance(statement, ast.If) and not statement.orelse and leaves(statement.body)
        ][:MOST]
    found: list[Leaving] = source.known[key]
    return found


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a branch ends the function, the loop's turn or the process."""
    last = body[-1]
    if isinstance(last, LEAVES):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and dotted(call.func) in ("exit", "quit", "sys.exit", "os._exit")


def _parts(source: Source, test: ast.expr, holds: bool) -> set[Condition]:
    key = ("parts", id(test), holds)
    if key not in source.known:
        source.known[key] = _conjunction(test, holds)
    found: set[Condition] = source.known[key]
    return found


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


def exclusive(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether some test has to hold for one statement and must not for the other."""
    key = ("exclusive", _context(source, one), _context(source, other))
    if key not in source.known:
        first, second = conditions(source, one), conditions(source, other)
        contradict = any((test, not holds) in second for test, holds in first)
        source.known[key] = contradict or _sides(source, one, other)
    found: bool = source.known[key]
    return found


def _sides(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether they are on different sides of one ``if`` or ``try``."""
    below: dict[ast.AST, ast.AST] = {}  # for each node around ``other``, the one in it that leads there
    child = source.statement(other)
    for parent in source.ancestors(child):
        below[parent] = child
        child = parent
    child = source.statement(one)
    for parent in source.ancestors(child):
        if isinstance(parent, (ast.If, *TRIES)) and parent in below:
            return (source.field(child) == "body") is not (source.field(below[parent]) == "body")
        child = parent
    return False


def contexts(source: Source, statements: Iterable[ast.AST]) -> list[ast.AST]:
    """One of ``statements`` for each context that they stand in: to be compared with, it stands for all of them."""
    found: dict[Hashable, ast.AST] = {}
    for statement in statements:
        found.setdefault(_context(source, statement), statement)
        if len(found) == MOST:
            break
    return list(found.values())


def rebound(source: Source, name: str, first: ast.AST, second: ast.AST) -> bool:
    """Whether ``name`` may mean another object where ``second`` runs than the one that ``first`` gave it.

    ``net = net.cuda()`` and ``net = prepare(net)`` go on with it, ``net = Other()`` and ``net = net.module`` do not.
    """
    lines = _rebindings(source).get((source.scope(second), name), [])
    start, end = getattr(first, "lineno", 0), getattr(second, "lineno", 0)
    after = bisect.bisect_right(lines, start)
    return after < len(lines) and lines[after] < end


def _rebindings(source: Source) -> dict[tuple[ast.AST, str], list[int]]:
    """The lines on which a name of a scope is given another object, in order."""
    key = "rebindings"
    if key not in source.known:
        found: dict[tuple[ast.AST, str], list[int]] = {}
        for node in source.kind(ast.Assign):
            value = text(node.value)
            used = source.names_in(node.value)
            for name in set[str]().union(*map(source.names_in, node.targets)):
                if name not in used or value == f"{name}.module":
                    found.setdefault((source.scope(node), name), []).append(node.lineno)
        for lines in found.values():
            lines.sort()
        source.known[key] = found
    rebindings: dict[tuple[ast.AST, str], list[int]] = source.known[key]
    return rebindings


def certain(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether one of two statements runs in every execution in which the other does."""
    first, second = conditions(source, one), conditions(source, other)
    return first <= second or second <= first


def evaluates(source: Source, node: ast.AST) -> bool:
    """Whether a statement is in a branch or function for evaluation, or in a branch that leaves before training."""
    passed: list[Hashable] = []  # what holds for the blocks around holds for those inside
    answer = False
    child = source.statement(node)
    for parent in source.ancestors(child):
        place = source.place(child)
        if place is not None:
            key = ("evaluates", id(place.block))
            if key in source.known:
                answer = source.known[key]
                break
            passed.append(key)
        answer = _is_for_evaluation(source, parent, child)
        if answer:
            break
        child = parent
    source.known.update(dict.fromkeys(passed, answer))
    return answer


def _is_for_evaluation(source: Source, parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(parent, ast.If) and source.field(child) == "body":
        return leaves(parent.body) or EVALUATES.search(ast.unparse(parent.test)) is not None
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return EVALUATES.search(parent.name) is not None
    return False
