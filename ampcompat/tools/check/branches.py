"""What the ``if`` statements around a statement say of the runs in which it is reached."""

from __future__ import annotations

import ast
import re

from ampcompat.tools.check.source import SCOPES, Source, once

LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: The text of a test, and whether it holds.
Condition = tuple[str, bool]
#: What stands before the last part of a dotted name: a method's ``self.args.fp16`` is a function's ``args.fp16``.
PREFIX = re.compile(r"\b[a-zA-Z_]\w*\.")
HALF = re.compile(r"(?<!b)float16|fp16|half")
WIDE = re.compile(r"bfloat16|float32|float64|double")
AMP = re.compile(r"(\b|_)amp|apex|fp16|half|mixed|scaler")


@once
def conditions(source: Source, node: ast.AST) -> frozenset[Condition]:
    """The tests of the ``if`` statements around ``node`` in its function, and of those above it that leave."""
    found: set[Condition] = set()
    for child, parent in source.around(node):
        if isinstance(child, SCOPES):
            break
        place = source.place(child)
        for earlier in [] if place is None else place.block[: place.position]:
            if isinstance(earlier, ast.If) and isinstance(earlier.body[-1], LEAVES):
                found |= _of_test(source, earlier.test, False)
        if isinstance(parent, ast.If):
            found |= _of_test(source, parent.test, source.field(child) == "body")
    return frozenset(found)


def contradict(source: Source, first: ast.AST, second: ast.AST) -> bool:
    """Whether the tests around one node, read as text, rule out those around another, perhaps of another function."""
    known = conditions(source, second)
    return any((test, not holds) in known for test, holds in conditions(source, first))


def is_not_half(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` says that it is reached with another dtype than float16."""
    for test, holds in conditions(source, node):
        names_half = HALF.search(test) is not None
        names_other = "dtype" in test and WIDE.search(test) is not None
        if (names_half and not holds) or (names_other and not names_half and holds):
            return True
    return False


def is_without_amp(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` says that it is reached without amp: the ``else`` of ``if use_amp``."""
    return any(AMP.search(test.lower()) and not holds for test, holds in conditions(source, node))


def asks_for_level(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` asks for the level."""
    return any("opt_level" in test.lower() for test, _ in conditions(source, node))


@once
def _of_test(source: Source, test: ast.expr, holds: bool) -> set[Condition]:
    """What follows from a test that holds or does not, as a whole and in its parts."""
    return {(_text(test), holds), *_parts(test, holds)}


def _parts(test: ast.expr, holds: bool) -> set[Condition]:
    """What follows from a test: its negations resolved (``not a``, ``a != b``), and the parts of a conjunction.

    ``a is not None`` counts as ``a``.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _parts(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is holds:
        return {condition for part in test.values for condition in _parts(part, holds)}
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = _text(test.left), _text(test.comparators[0])
        if right == "None" and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return {(left, holds is isinstance(test.ops[0], ast.IsNot))}
        if isinstance(test.ops[0], ast.NotEq | ast.IsNot | ast.NotIn):
            return {(f"{left} == {right}", not holds)}
        if isinstance(test.ops[0], ast.Eq | ast.Is | ast.In):
            return {(f"{left} == {right}", holds)}
    return {(_text(test), holds)}


def _text(node: ast.expr) -> str:
    """The code of a node, with the last part of each dotted name."""
    return PREFIX.sub("", ast.unparse(node))
