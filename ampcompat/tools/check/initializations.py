"""The calls of ``amp.initialize`` in a file, and the levels that each of them may be given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import Source, argument, once
from ampcompat.tools.level_table import LEVELS, Level

INITIALIZE = ("apex.amp.initialize", "apex.amp.frontend.initialize")
DEFAULT_LEVEL = "O1"


@dataclass(frozen=True)
class Initialization:
    """What one call of ``amp.initialize`` may be given.

    Attributes:
        usual: The level, unless a command line says otherwise; None where it is not known.
        possible: Every level that it may be.
        masters: The literal ``master_weights`` of the call; None without one.
        loss_scale: The literal ``loss_scale`` of the call; None without one.
        casts_functions: False where the call says ``patch_torch_functions=False``.
    """

    usual: str | None
    possible: tuple[str, ...]
    masters: bool | None = None
    loss_scale: float | str | None = None
    casts_functions: bool = True

    @property
    def is_literal(self) -> bool:
        """Whether the source names the level, and leaves no other."""
        return self.usual is not None and self.possible == (self.usual,)

    def at(self, name: str) -> Level:
        """The row of a level, with what the arguments of the call change in it."""
        level = LEVELS[name]
        if self.masters is not None:
            level = replace(level, masters=self.masters)
        if self.loss_scale is not None:
            level = replace(level, loss_scale=self.loss_scale)
        if not self.casts_functions:
            level = replace(level, functions="")
        return level


#: What is in force where no call of ``initialize`` is known.
ANY_LEVEL = Initialization(usual=None, possible=tuple(LEVELS))
#: A call with ``enabled=False``: nothing is cast or scaled, as at O0.
OFF = Initialization(usual="O0", possible=("O0",))


@once
def initializing_calls(source: Source) -> list[ast.Call]:
    """The calls of ``initialize`` in a file that are not switched off by ``enabled=False``."""
    return [call for call in source.calls_to(*INITIALIZE) if not _is_off(call)]


def _is_off(call: ast.Call) -> bool:
    enabled = argument(call, 2, "enabled")
    return isinstance(enabled, ast.Constant) and not enabled.value


def initializations(source: Source) -> Iterator[Initialization]:
    """What each call of ``initialize`` in a file may be given."""
    for call in source.calls_to(*INITIALIZE):
        if _is_off(call):
            yield OFF
            continue
        usual, possible = _levels(source, call)
        masters = _literal(argument(call, 7, "master_weights"))
        scale = _literal(argument(call, 8, "loss_scale"))
        yield Initialization(
            usual=usual,
            possible=possible,
            masters=masters if isinstance(masters, bool) else None,
            loss_scale=scale if isinstance(scale, float | int | str) else None,
            casts_functions=_literal(argument(call, 5, "patch_torch_functions")) is not False,
        )


def _levels(source: Source, call: ast.Call) -> tuple[str | None, tuple[str, ...]]:
    """The usual level of a call, and all possible ones."""
    given = argument(call, 3, "opt_level")
    if given is None:
        unpacks = any(keyword.arg is None for keyword in call.keywords)
        unpacks = unpacks or any(isinstance(value, ast.Starred) for value in call.args)
        return (None, tuple(LEVELS)) if unpacks else (DEFAULT_LEVEL, (DEFAULT_LEVEL,))
    option = _options(source).get(given.attr) if isinstance(given, ast.Attribute) else None
    named = _values(source, given)
    if option is not None and named is not None:  # the script replaces it in some runs
        return None, tuple(LEVELS)
    if named is not None:
        levels = tuple(level for level in LEVELS if level in named)
        return (levels[0] if len(levels) == 1 else None, levels or tuple(LEVELS))
    if option is None:
        return None, tuple(LEVELS)
    default, choices = option
    allowed = tuple(level for level in LEVELS if level in choices) or tuple(LEVELS)
    return (str(default) if default in LEVELS else None), allowed


def _literal(node: ast.expr | None) -> object:
    """The value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def _values(source: Source, node: ast.expr) -> list[object] | None:
    """The literals that an expression may be, or that its name is given; None where one is no literal."""
    parts = source.assigned.get(dotted(node), []) or [node]
    choices = [
        choice for part in parts for choice in ([part.body, part.orelse] if isinstance(part, ast.IfExp) else [part])
    ]
    if not all(isinstance(choice, ast.Constant) for choice in choices):
        return None
    return [_literal(choice) for choice in choices]


@once
def _options(source: Source) -> dict[str, tuple[object, list[object]]]:
    """The default and the choices of each option of argparse, by the attribute that holds its value."""
    found: dict[str, tuple[object, list[object]]] = {}
    for call in source.calls_named("add_argument"):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        flags = [str(flag.value) for flag in call.args if isinstance(flag, ast.Constant)]
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = str(_literal(keywords.get("dest")) or long.lstrip("-").replace("-", "_"))
        default, choices = keywords.get("default"), keywords.get("choices")
        defaults = [] if default is None else _values(source, default) or []
        listed = choices.elts if isinstance(choices, ast.List | ast.Tuple | ast.Set) else []
        found[name] = (defaults[0] if len(defaults) == 1 else None), [_literal(choice) for choice in listed]
    return found
