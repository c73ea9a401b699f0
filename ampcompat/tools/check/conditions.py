"""What the ``if`` statements around a statement say of the runs in which it is reached."""

from __future__ import annotations

import ast
import re

from ampcompat.tools.check.source import SCOPES, Source, once

LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
#: What stands before the last part of a dotted name: a method's ``self.args.fp16`` is a function's ``args.fp16``.
PREFIX = re.compile(r"\b[a-zA-Z_]\w*\.")
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}
#: Words of tests that are about amp or about a precision.
AMP = re.compile(r"(\b|_)amp|apex|fp16|float16|half|mixed|scaler|opt_level|dtype", re.IGNORECASE)


@once
def conditions(source: Source, node: ast.AST) -> frozenset[tuple[str, bool]]:
    """The tests, as text, of the ``if`` statements around ``node`` in its function, and of those above that leave."""
    found: set[tuple[str, bool]] = set()
    for child, parent in source.around(node):
        if isinstance(child, SCOPES):
            break
        place = source.place(child)
        for earlier in [] if place is None else place.block[: place.position]:
            if isinstance(earlier, ast.If) and isinstance(earlier.body[-1], LEAVES):
                found |= _parts(earlier.test, False)
        if isinstance(parent, ast.If):
            found |= _parts(parent.test, source.field(child) == "body")
    return frozenset(found)


def contradict(source: Source, first: ast.AST, second: ast.AST) -> bool:
    """Whether the tests around one node rule out those around another, perhaps of another function."""
    known = conditions(source, second)
    return any((test, not holds) in known for test, holds in conditions(source, first))


def is_without_amp(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` says that it is reached without amp: the ``else`` of ``if use_amp``."""
    return any(AMP.search(test) and not holds for test, holds in conditions(source, node))


def asks_for_level(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` asks for the level."""
    return any("opt_level" in test.lower() for test, _ in conditions(source, node))


def asks_for_precision(source: Source, node: ast.AST) -> bool:
    """Whether any test around ``node`` is about precision, so that the code has thought of it."""
    return any(AMP.search(test) for test, _ in conditions(source, node))


def _parts(test: ast.expr, holds: bool) -> set[tuple[str, bool]]:
    """What follows from a test: negations resolved (``not a``, ``a != b``, ``a is not None``), and its conjuncts."""
    found = {(PREFIX.sub("", ast.unparse(test)), holds)}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return found | _parts(test.operand, not holds)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is holds:
        return found.union(*(_parts(part, holds) for part in test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return found | _parts_of_comparison(test, holds)
    return found


def _parts_of_comparison(test: ast.Compare, holds: bool) -> set[tuple[str, bool]]:
    """What follows from a comparison: ``a != b`` is a negated ``a == b``, and ``a is not None`` counts as ``a``."""
    (comparison,), (other,) = test.ops, test.comparators
    opposite = OPPOSITES.get(type(comparison))
    if opposite is not None:
        return _parts(ast.Compare(test.left, [opposite()], test.comparators), not holds)
    if isinstance(comparison, ast.Is) and isinstance(other, ast.Constant) and other.value is None:
        return _parts(test.left, not holds)
    return set()
