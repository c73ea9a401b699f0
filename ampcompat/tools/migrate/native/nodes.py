"""Nodes of a tree: what they consist of, and what calls, names and displays hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator

import libcst as cst

#: Nodes that are layout alone.
LAYOUT = (
    cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Newline, cst.Comment, cst.Comma,
    cst.Semicolon, cst.Colon, cst.Dot, cst.AssignEqual, cst.LeftParen, cst.RightParen, cst.LeftSquareBracket,
    cst.RightSquareBracket, cst.LeftCurlyBrace, cst.RightCurlyBrace, cst.BaseBinaryOp, cst.BaseBooleanOp,
    cst.BaseUnaryOp, cst.BaseCompOp, cst.BaseAugOp,
)  # fmt: skip


@functools.cache
def _field_names(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind))


@functools.cache
def is_code(kind: Hashable) -> bool:
    """Whether objects of a type are nodes, and not layout; asked once for each type, since ``isinstance`` is slow."""
    return isinstance(kind, type) and issubclass(kind, cst.CSTNode) and not issubclass(kind, LAYOUT)


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """What a node consists of, without layout; many times faster than ``node.children``."""
    found: list[cst.CSTNode] = []
    for name in _field_names(type(node)):
        value = getattr(node, name)
        values = value if type(value) in (list, tuple) else (value,)
        for one in values:
            kind: Hashable = one.__class__
            if is_code(kind):
                found.append(one)
    return found


def descendants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all that is in it."""
    yield node
    for child in children(node):
        yield from descendants(child)


def literal_key(node: cst.Subscript) -> str | None:
    """``g`` for ``optimizers["g"]``."""
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return None
    value = node.slice[0].slice.value
    return value.raw_value if isinstance(value, cst.SimpleString) else None


def argument(call: cst.Call, position: int, name: str) -> cst.BaseExpression | None:
    """An argument of a call by its place or keyword; None where it is absent."""
    places = [arg for arg in call.args if arg.keyword is None and not arg.star]
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg.value
    return places[position].value if position < len(places) else None


def elements(node: cst.BaseExpression | None) -> list[cst.BaseExpression] | None:
    """The elements of a list or tuple display; None for other expressions."""
    if isinstance(node, cst.List | cst.Tuple):
        return [element.value for element in node.elements]
    return None


def last_name(node: cst.CSTNode) -> str:
    """``step`` for ``self.optimizer.step``."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
