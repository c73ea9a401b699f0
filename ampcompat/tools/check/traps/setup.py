"""Traps around ``amp.initialize``: what is handed to it, and what is done to that before or after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.halves import HALF_DTYPES, named_dtypes
from ampcompat.tools.check.source import Source, argument, called, number, once
from ampcompat.tools.check.together import certain, conditions, evaluates, exclusive, rebound
from ampcompat.tools.check.traps.repository import Repository

AMP = re.compile(r"fp_?16|\bamp|_amp|apex|half|mixed|precision", re.IGNORECASE)
OPTIMIZER = re.compile(r"(?:.*[._])?(?:optim|optimizer|opt)")
ADAMS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")


def misspelt_level(source: Source, repository: Repository) -> Iterator[Finding]:
    """``opt_level="01"``: the prefix is the letter O. ``initialize`` refuses the digit zero."""
    for call in source.calls_to("apex.amp.initialize"):
        level = argument(call, 3, "opt_level")
        if isinstance(level, ast.Constant) and isinstance(level.value, str) and re.fullmatch(r"0[0-5]", level.value):
            right = f"O{level.value[1]}"
            note = f'opt_level="{level.value}" starts with a zero and is refused; write the letter: "{right}"'
            yield source.finding(level, "trap", "misspelt_level", ERROR, note)


def _given(source: Source) -> list[tuple[ast.Call, ast.expr]]:
    """Each model given to an ``initialize`` call, with the call."""
    found: list[tuple[ast.Call, ast.expr]] = []
    for call in source.calls_to("apex.amp.initialize"):
        given = argument(call, 0, "models")
        if isinstance(given, ast.List | ast.Tuple):
            found += [(call, model) for model in given.elts]
        elif given is not None:
            found.append((call, given))
    return found


def _assigned(source: Source, name: str, beside: ast.AST) -> list[tuple[ast.Assign, ast.Call]]:
    """The assignments of a call's result to ``name`` in the scope of ``beside``."""
    return _assigned_calls(source).get((source.scope(beside), name), [])


@once
def _assigned_calls(source: Source) -> dict[tuple[ast.AST, str], list[tuple[ast.Assign, ast.Call]]]:
    found: dict[tuple[ast.AST, str], list[tuple[ast.Assign, ast.Call]]] = {}
    for node in source.kind(ast.Assign):
        if isinstance(node.value, ast.Call):
            for target in {dotted(target) for target in node.targets} - {""}:
                found.setdefault((source.scope(node), target), []).append((node, node.value))
    return found


def _cast_to_half(source: Source, node: ast.AST) -> ast.Call | None:
    """The cast in ``Net().half().cuda()``, ``net.to(torch.float16)`` or ``network_to_half(net)``."""
    while isinstance(node, ast.Call):
        symbol = source.apex(node.func) or ""
        if symbol in ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network") and node.args:
            return node
        if not isinstance(node.func, ast.Attribute):
            return None
        if node.func.attr == "half" and not node.args:
            return node
        if node.func.attr == "to" and named_dtypes(node) & HALF_DTYPES:
            return node
        node = node.func.value
    return None


def half_by_hand(source: Source, repository: Repository) -> Iterator[Finding]:
    """``model.half()`` on a model that amp manages.

    Before ``initialize`` it is refused: the float32 weights that masters and O1 need are already gone. Afterwards it
    rounds the weights away. ``opt_level="O2"`` (or O3) is the way to ask for a half model.
    """
    casts: dict[int, tuple[ast.AST, str]] = {}
    by_name = _casts_by_name(source)
    for call, model in _given(source):
        name = dotted(model)
        inner = _cast_to_half(source, model)
        if inner is not None:
            casts[id(inner)] = inner, "a model"
        for statement, cast in by_name.get((source.scope(call), name), ()) if name else ():
            if id(cast) in casts:
                continue
            if exclusive(source, statement, call) or evaluates(source, statement):
                continue
            if rebound(source, name, statement, call) or _cast_back(source, name, statement, call):
                continue
            casts[id(cast)] = cast, name
    for found, name in casts.values():
        note = f"{name} is given to amp.initialize, which needs it in float32; drop the cast and choose O2 or O3"
        yield source.finding(found, "trap", "half_by_hand", ERROR, note)


def _casts_by_name(source: Source) -> dict[tuple[ast.AST, str], list[tuple[ast.stmt, ast.Call]]]:
    """Statements that cast to half, by scope and by the name of what is half then.

    ``model.half()`` for what it does to the model, and ``model = Net().half()``.
    """
    found: dict[tuple[ast.AST, str], list[tuple[ast.stmt, ast.Call]]] = {}
    statements: list[ast.Expr | ast.Assign] = [*source.kind(ast.Expr), *source.kind(ast.Assign)]
    for statement in statements:
        cast = _cast_to_half(source, statement.value)
        if cast is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for name in {*map(dotted, targets), _casts(source, cast)} - {""}:
            found.setdefault((source.scope(statement), name), []).append((statement, cast))
    return found


def _cast_back(source: Source, name: str, cast: ast.stmt, initialize: ast.Call) -> bool:
    """Whether ``name.float()`` stands between a cast to half and ``initialize``."""
    calls = [call for call in source.calls_named("float", "double") if dotted(call.func).rpartition(".")[0] == name]
    return any(cast.lineno < call.lineno < initialize.lineno for call in calls)


def _casts(source: Source, cast: ast.Call) -> str:
    """The name of what a cast is applied to."""
    if isinstance(cast.func, ast.Attribute) and source.apex(cast.func) is None:
        return dotted(cast.func.value)
    return dotted(cast.args[0])


def wrapped_before_initialize(source: Source, repository: Repository) -> Iterator[Finding]:
    """A model wrapped in DistributedDataParallel or DataParallel before ``initialize`` is refused: wrap it after."""
    wrapped: dict[ast.AST, tuple[str, bool]] = {}
    for initialize, model in _given(source):
        name = dotted(model)
        for node, call in _assigned(source, name, initialize):
            if node.lineno >= initialize.lineno or called(call) not in WRAPPERS:
                continue
            if exclusive(source, node, initialize) or rebound(source, name, node, initialize):
                continue
            if not _amp_is_off(source, node):
                _, before = wrapped.get(node, ("", False))
                wrapped[node] = name, before or certain(source, node, initialize)
    for statement, (name, is_certain) in wrapped.items():
        note = f"{name} is wrapped before amp.initialize, which refuses it; initialize first, then wrap"
        yield source.finding(statement, "trap", "wrapped_before_initialize", ERROR if is_certain else WARNING, note)


def _amp_is_off(source: Source, node: ast.AST) -> bool:
    """Whether a test around ``node`` says that apex is not in use there, in whatever words."""
    return any(not holds and AMP.search(test) for test, holds in conditions(source, node))


def level_as_enabled(source: Source, repository: Repository) -> Iterator[Finding]:
    """``initialize(model, opt, "O2")``: the third parameter is ``enabled``; at apex the level stayed O1."""
    for call in source.calls_to("apex.amp.initialize"):
        third = call.args[2] if len(call.args) > 2 else argument(call, 2, "enabled")
        if not (isinstance(third, ast.Constant) and isinstance(third.value, str)):
            continue
        named = re.sub("^[oO0]", "O", third.value)
        if not re.fullmatch("O[0-5]", named):
            continue
        by_name = argument(call, 3, "opt_level") or ast.Constant("O1")
        if isinstance(by_name, ast.Constant) and named != by_name.value:
            note = f"the third parameter is enabled: apex ran at {by_name.value!s}, here it is refused;"
            note += f' write opt_level="{named}"'
            yield source.finding(third, "trap", "level_as_enabled", ERROR, note)


def adam_eps_in_half(source: Source, repository: Repository) -> Iterator[Finding]:
    """Adam's default ``eps=1e-8`` with a literal O3: its state is half, where 1e-8 is zero, and 0/0 is NaN."""
    made: dict[ast.Call, None] = {}
    for initialize in source.calls_to("apex.amp.initialize"):
        level = argument(initialize, 3, "opt_level")
        if isinstance(level, ast.Constant) and level.value == "O3":
            made.update(dict.fromkeys(_optimizers_of(source, initialize)))
    for call in made:
        if called(call) not in ADAMS or source.apex(call.func):
            continue
        given = argument(call, 3, "eps")
        eps = number(given)
        if given is None or (eps is not None and 0 < eps < 2.0**-25):
            name, value = called(call), eps or 1e-8
            note = f"at O3 {name} keeps its state in half, where eps={value:g} is 0; pass eps=1e-4 or use O2"
            yield source.finding(call, "trap", "adam_eps_in_half", ERROR, note)


def _optimizers_of(source: Source, initialize: ast.Call) -> list[ast.Call]:
    """The calls that make the optimizers of an ``initialize`` call: its argument, and what its names were given."""
    given = argument(initialize, 1, "optimizers")
    parts = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
    made = [part for part in parts if isinstance(part, ast.Call)]
    for name in {dotted(part) for part in parts} - {""}:
        for node, call in _assigned(source, name, initialize):
            if not exclusive(source, node, initialize) and not rebound(source, name, node, initialize):
                made.append(call)
    return made


def deepcopy_of_optimizer(source: Source, repository: Repository) -> Iterator[Finding]:
    """``copy.deepcopy(optimizer)`` copies the parameters along: the copy steps tensors that no model holds.

    Build a new optimizer over the model's parameters and load the ``state_dict()`` of the first.
    """
    optimizers = {dotted(argument(c, 1, "optimizers")) for c in source.calls_to("apex.amp.initialize")} - {""}
    for call in source.calls_named("deepcopy"):
        name = dotted(call.args[0]) if call.args else ""
        if not name:
            continue
        if name in optimizers or OPTIMIZER.fullmatch(name):
            note = f"the copy of {name} updates parameters of its own; build a new one and load its state_dict()"
            yield source.finding(call, "trap", "deepcopy_of_optimizer", WARNING, note)
