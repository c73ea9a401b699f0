"""What an argument may be: a literal, a name that is given one, or an option of the command line."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import Source, number, once

UNKNOWN = object()
#: Names of names that are followed until a value is given up.
MOST_NAMES = 5


@dataclass(frozen=True)
class Values:
    """What an expression may be.

    Attributes:
        usual: What it is, unless a command line says otherwise; ``UNKNOWN`` if no such thing is known.
        others: What else it can be.
        is_open: Whether it can be anything else, too.
        option: The option that it is the value of, to be looked up in :func:`options`; "" for none.
    """

    usual: object = UNKNOWN
    others: tuple[object, ...] = ()
    is_open: bool = True
    option: str = ""

    @classmethod
    def only(cls, value: object) -> Values:
        """The values of what is ``value`` for certain."""
        return cls(value, (), False)

    def looked_up(self, options: Mapping[str, Values]) -> Values:
        """The values of the option that this stands for; itself where it stands for none, or that is not known."""
        return options.get(self.option, self)


def values_of(source: Source, node: ast.expr | None, most_names: int = MOST_NAMES) -> Values:
    """What an expression of a file may be."""
    if isinstance(node, ast.Constant):
        return Values.only(node.value)
    if isinstance(node, ast.UnaryOp | ast.BinOp | ast.Call) and (computed := number(node)) is not None:
        return Values.only(computed)
    if isinstance(node, ast.IfExp):
        return _either(values_of(source, node.body, most_names), values_of(source, node.orelse, most_names))
    if isinstance(node, ast.Name | ast.Attribute) and most_names:
        return _of_name(source, node, most_names - 1)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return Values(option=node.slice.value)
    return Values()


def _either(first: Values, second: Values) -> Values:
    known = [value for value in (first.usual, second.usual, *first.others, *second.others) if value is not UNKNOWN]
    return Values(UNKNOWN, tuple(known), first.is_open or second.is_open)


def _of_name(source: Source, node: ast.Name | ast.Attribute, most_names: int) -> Values:
    """What a name may be: what its one assignment gives it, or the option of that name for ``args.name``."""
    given = given_values(source).get(dotted(node), [])
    if isinstance(node, ast.Attribute):
        if not given:
            return Values(option=node.attr)
        if node.attr in _declarations(source):
            return Values()  # the option is overwritten, perhaps
    elif source.is_parameter(node.id, node):
        return Values()
    return values_of(source, given[0], most_names) if len(given) == 1 else Values()


@once
def given_values(source: Source) -> dict[str, list[ast.expr | None]]:
    """What each name and each ``a.b`` is given anywhere in the file; None where that is not a plain assignment."""
    found: dict[str, list[ast.expr | None]] = {}
    plain: set[ast.AST] = set()
    for statement in source.kind(ast.Assign):
        for target in statement.targets:
            for part, value in _pairs(target, statement.value):
                found.setdefault(dotted(part), []).append(value)
                plain.add(part)
    stored: list[ast.Name | ast.Attribute] = [*source.kind(ast.Name), *source.kind(ast.Attribute)]
    for name in stored:
        if isinstance(name.ctx, ast.Store) and name not in plain:
            found.setdefault(dotted(name), []).append(None)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What is given what: ``a, b = 1, 2`` gives each its own, and any other assignment the whole."""
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return [(target, value)]
    has_star = any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
    is_one_by_one = len(target.elts) == len(value.elts) and not has_star
    return list(zip(target.elts, value.elts, strict=True)) if is_one_by_one else [(target, value)]


# -- options of the command line ---------------------------------------------------------------------------------------
@once
def options(source: Source) -> dict[str, Values]:
    """The options that a file declares with argparse, by the names of their values."""
    found: dict[str, Values] = {}
    for name, calls in _declarations(source).items():
        found[name] = _declared(source, calls[0]) if len(calls) == 1 else Values()
    return found


@once
def _declarations(source: Source) -> dict[str, list[ast.Call]]:
    """The calls of ``add_argument``, by the names of the options' values."""
    found: dict[str, list[ast.Call]] = {}
    for call in source.calls_named("add_argument"):
        found.setdefault(_destination(call), []).append(call)
    return found


def _destination(call: ast.Call) -> str:
    """The name of an option's value: ``dest``, or that of its first long flag, as argparse makes it."""
    dest = {keyword.arg: keyword.value for keyword in call.keywords}.get("dest")
    if isinstance(dest, ast.Constant):
        return str(dest.value)
    flags = [str(flag.value) for flag in call.args if isinstance(flag, ast.Constant)]
    long = [flag for flag in flags if flag.startswith("--")]
    first = next(iter(long or flags), "")
    return first.lstrip("-").replace("-", "_")


def _declared(source: Source, call: ast.Call) -> Values:
    """The default and the choices of an option."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    default: object = None
    if "default" in keywords:
        default = values_of(source, keywords["default"]).usual
    choices = keywords.get("choices")
    if not isinstance(choices, ast.List | ast.Tuple | ast.Set):
        return Values(default)
    listed = [values_of(source, choice).usual for choice in choices.elts]
    return Values(default, tuple(choice for choice in listed if choice is not UNKNOWN), UNKNOWN in listed)
