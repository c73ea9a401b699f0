"""Traps in the arguments of ``amp.initialize``, ``amp.scale_loss`` and ``amp.load_state_dict``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from ampcompat.tools.check.assigned import value_above
from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import conditions, contradict
from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.settings import DEFAULT_LEVEL, initializations
from ampcompat.tools.check.source import SCALE_LOSS, Source, argument, called
from ampcompat.tools.check.traps.models import RETURN_MODEL
from ampcompat.tools.check.values import options, values_of
from ampcompat.tools.level_table import LEVELS

#: The keys of ``amp.state_dict()`` begin so.
OWN_KEYS = "loss_scaler"
#: What is meant as a level, also where it is a default.
DIGITS = range(10)
LIKE_A_LEVEL = re.compile("[oO0]?[0-9]")


def misspelt_level(source: Source) -> Iterator[Mistake]:
    """``opt_level="01"``, ``"o1"`` or ``1``: the prefix is the letter O. ``initialize`` refuses what names no level."""
    for call, initialization in initializations(source).items():
        level = argument(call, 3, "opt_level")
        if level is None or initialization.is_off:
            continue
        given = values_of(source, level).looked_up(options(source)).usual
        if not isinstance(given, str) and given not in DIGITS:
            continue
        meant = f"O{str(given).lstrip('oO0') or '0'}"
        if given == f"0{meant[1:]}" and meant in LEVELS:
            note = f'opt_level="{given}" starts with a zero and is refused; write the letter: "{meant}"'
            yield Mistake(level, note, ERROR)
        elif _names_no_level(given, level) and not _is_tested(source, call, level):
            fix = f'"{meant}"' if meant in LEVELS else f"one of {', '.join(LEVELS)}"
            yield Mistake(level, f"opt_level={json.dumps(given)} is no level and is refused; write {fix}", ERROR)


def _names_no_level(given: object, level: ast.expr) -> bool:
    """Whether a value that stands for the level is none; a default such as ``"off"`` may be replaced before."""
    is_literal = isinstance(level, ast.Constant)
    return given not in LEVELS and (is_literal or LIKE_A_LEVEL.fullmatch(str(given)) is not None)


def _is_tested(source: Source, call: ast.Call, level: ast.expr) -> bool:
    """Whether a test around a call asks what the level is."""
    name = dotted(level).rpartition(".")[2]
    return bool(name) and any(name in test for test, _ in conditions(source, call))


def level_as_enabled(source: Source) -> Iterator[Mistake]:
    """``initialize(model, opt, "O2")``: the third parameter is ``enabled``; at apex the level stayed O1."""
    for call in initializations(source):
        third = argument(call, 2, "enabled")
        if third is None:
            continue
        by_position = _level_named(source, third)
        by_name = argument(call, 3, "opt_level")
        in_force = DEFAULT_LEVEL if by_name is None else _level_named(source, by_name)
        if by_position and in_force and by_position != in_force:
            note = f"the third parameter is enabled: apex ran at {in_force}, here it is refused;"
            note += f' write opt_level="{by_position}"'
            yield Mistake(third, note, ERROR)
        elif dotted(third).endswith("opt_level") and by_name is None:
            note = f"the third parameter is enabled: {DEFAULT_LEVEL} is in force, and the name of another level is"
            note += f" refused; write opt_level={dotted(third)}"
            yield Mistake(third, note, WARNING)


def wrapped_before_initialize(source: Source) -> Iterator[Mistake]:
    """``model = DataParallel(model)`` above ``amp.initialize(model, ...)``, which refuses wrapped models."""
    if source.bindings.is_native:  # it takes them
        return
    for call, initialization in initializations(source).items():
        given = argument(call, 0, "models")
        models = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
        for model in [] if initialization.is_off else models:
            value = _last_value(source, call, model) if isinstance(model, ast.Name) else model
            wrapper = _wrapper(source, value)
            if value is None or not wrapper or contradict(source, value, call):
                continue
            is_certain = conditions(source, value) <= conditions(source, call)
            note = f"the model is already wrapped in {wrapper} and is refused; initialize it first, and wrap what"
            note += " amp.initialize returns"
            yield Mistake(call, note if is_certain else f"in some runs {note}", ERROR if is_certain else WARNING)


def _last_value(source: Source, call: ast.Call, name: ast.Name) -> ast.expr | None:
    """What a name is given above a call, if nothing else than a plain assignment gives it something afterwards."""
    value = value_above(source, name)
    last = 0 if value is None else value.end_lineno or 0
    first = getattr(source.statement(call), "lineno", 0)
    for other in source.kind(ast.Name):
        is_bound = other.id == name.id and isinstance(other.ctx, ast.Store)
        if is_bound and last < other.lineno < first and source.scope(other) is source.scope(call):
            return None
    return value


def _wrapper(source: Source, value: ast.expr | None) -> str:
    """The wrapper that ``initialize`` refuses, if an expression makes one: a class by its name, or torch's."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and called(value) in RETURN_MODEL:
        value = value.func.value
    if not isinstance(value, ast.Call):
        return ""
    function = source.full_name(value.func) or dotted(value.func)
    name = function.rpartition(".")[2]
    is_of_torch = name == "DataParallel" and function.startswith("torch.")
    return name if name == "DistributedDataParallel" or is_of_torch else ""


def _level_named(source: Source, node: ast.expr) -> str:
    """The level that an expression names, unless a command line says otherwise; "" for none."""
    given = values_of(source, node).looked_up(options(source)).usual
    named = f"O{given[1:]}" if isinstance(given, str) and given[:1] in ("o", "O", "0") else ""
    return named if named in LEVELS else ""


def loss_id_out_of_range(source: Source) -> Iterator[Mistake]:
    """``scale_loss(loss, opt, loss_id=1)`` after ``initialize(..., num_losses=1)``: ids begin at 0."""
    for call in source.calls_to(*SCALE_LOSS):
        given = argument(call, 2, "loss_id")
        if not isinstance(given, ast.Constant) or not isinstance(given.value, int):
            continue
        loss_id = given.value
        known = [_num_losses(source, initialize) for initialize in initializations(source)]
        if known and all(number is not None and loss_id >= number for number in known):
            note = f"loss_id={loss_id} has no scaler and is refused: ids begin at 0; pass num_losses={loss_id + 1} to"
            note += " amp.initialize"
            yield Mistake(given, note, ERROR)


def _num_losses(source: Source, call: ast.Call) -> int | None:
    """The number of losses that a call of ``initialize`` is given; None where that is not known."""
    given = argument(call, 10, "num_losses")
    if given is None:
        unpacks = any(keyword.arg is None for keyword in call.keywords)
        return None if unpacks else 1
    number = values_of(source, given).looked_up(options(source)).usual
    return number if isinstance(number, int) else None


def whole_checkpoint(source: Source) -> Iterator[Mistake]:
    """``amp.load_state_dict(checkpoint)`` with the dict that the model's state is taken from, too."""
    for call in source.calls_to("apex.amp.load_state_dict", "apex.amp.frontend.load_state_dict"):
        name = dotted(call.args[0]) if call.args else ""
        if name and _has_other_entries(source, call.args[0], name):
            note = f'{name} holds more than the state of amp and is refused; pass its entry: {name}["amp"]'
            yield Mistake(call, note, ERROR)


def _has_other_entries(source: Source, given: ast.expr, name: str) -> bool:
    """Whether the function around ``given`` takes other entries than amp's from the dict that it is, ``name``."""
    for entry in source.kind(ast.Subscript):
        if dotted(entry.value) != name or source.scope(entry) is not source.scope(given):
            continue
        key = entry.slice.value if isinstance(entry.slice, ast.Constant) else None
        if not isinstance(key, str) or key.startswith(OWN_KEYS) or _is_taken_apart(source, entry, name):
            continue
        if _is_same_value(source, entry.value, given):
            return True
    return False


def _is_same_value(source: Source, first: ast.expr, second: ast.expr) -> bool:
    """Whether no assignment between two uses of a name binds it again."""
    if not isinstance(first, ast.Name) or not isinstance(second, ast.Name):
        return True
    return value_above(source, first) is value_above(source, second)


def _is_taken_apart(source: Source, entry: ast.Subscript, name: str) -> bool:
    """Whether the entry takes the dict's own place: ``checkpoint = checkpoint["amp"]``."""
    statement = source.statement(entry)
    return isinstance(statement, ast.Assign) and name in map(dotted, statement.targets)
