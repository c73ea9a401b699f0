"""Traps around ``amp.initialize``: what is handed to it, and what is done to that before or after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.check.findings import ERROR, WARNING, Finding
from ampcompat.check.source import Source, argument, called, text
from ampcompat.check.traps.repository import Repository

WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")


def misspelt_level(source: Source, repository: Repository) -> Iterator[Finding]:
    """``opt_level="01"``: the prefix is the letter O. ``initialize`` refuses the digit zero."""
    for call in source.calls_to("apex.amp.initialize"):
        level = argument(call, 3, "opt_level")
        if isinstance(level, ast.Constant) and isinstance(level.value, str) and re.fullmatch(r"0[0-5]", level.value):
            right = f"O{level.value[1]}"
            note = f'opt_level="{level.value}" starts with a zero and is refused; write the letter: "{right}"'
            yield source.finding(level, "trap", "misspelt_level", ERROR, note)


def _models(source: Source) -> list[tuple[ast.Call, str]]:
    """Each model given to an ``initialize`` call, by name."""
    found = []
    for call in source.calls_to("apex.amp.initialize"):
        given = argument(call, 0, "models")
        for model in given.elts if isinstance(given, ast.List | ast.Tuple) else [given]:
            if name := text(model):
                found.append((call, name))
    return found


def half_by_hand(source: Source, repository: Repository) -> Iterator[Finding]:
    """``model.half()`` on a model that amp manages.

    Before ``initialize`` it is refused: the float32 weights that masters and O1 need are already gone. Afterwards it
    rounds the weights away. ``opt_level="O2"`` (or O3) is the way to ask for a half model.
    """
    models = {(source.scope(call), name) for call, name in _models(source)}
    for call in source.calls:
        symbol = source.apex(call.func) or ""
        by_helper = symbol in ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network") and call.args
        if isinstance(call.func, ast.Attribute) and call.func.attr == "half" and not call.args:
            name = text(call.func.value)
        elif by_helper:
            name = text(call.args[0])
        else:
            continue
        if (source.scope(call), name) in models:
            note = f"{name} is given to amp.initialize, which needs it in float32; drop the cast and choose O2 or O3"
            yield source.finding(call, "trap", "half_by_hand", ERROR, note)


def wrapped_before_initialize(source: Source, repository: Repository) -> Iterator[Finding]:
    """A model wrapped in DistributedDataParallel or DataParallel before ``initialize`` is refused: wrap it after."""
    for initialize, name in _models(source):
        for node in source.nodes:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            same = source.scope(node) is source.scope(initialize) and name in map(text, node.targets)
            if same and called(node.value) in WRAPPERS and _always_before(source, node, initialize):
                note = f"{name} is wrapped before amp.initialize, which refuses it; initialize first, then wrap"
                yield source.finding(node, "trap", "wrapped_before_initialize", ERROR, note)


def _always_before(source: Source, first: ast.stmt, second: ast.AST) -> bool:
    """Whether ``first`` runs before ``second`` when both run: it comes earlier, and not in another branch."""
    if first.lineno >= getattr(second, "lineno", 0):
        return False
    above_first = [first, *source.ancestors(first)]
    above_second = [second, *source.ancestors(second)]
    for node in above_first:
        if isinstance(node, ast.If) and node in above_second:
            sides = {any(part in node.body for part in above) for above in (above_first, above_second)}
            if len(sides) == 2:
                return False
    return True


def deepcopy_of_optimizer(source: Source, repository: Repository) -> Iterator[Finding]:
    """``copy.deepcopy(optimizer)`` copies the parameters along: the copy steps tensors that no model holds.

    Build a new optimizer over the model's parameters and load the ``state_dict()`` of the first.
    """
    optimizers = {text(argument(c, 1, "optimizers")) for c in source.calls_to("apex.amp.initialize")} - {""}
    for call in source.calls:
        name = text(call.args[0]) if call.args else ""
        if called(call) != "deepcopy" or not name:
            continue
        if name in optimizers or re.fullmatch(r"(.*[._])?(optim|optimizer|opt)", name):
            note = f"the copy of {name} updates parameters of its own; build a new one and load its state_dict()"
            yield source.finding(call, "trap", "deepcopy_of_optimizer", WARNING, note)
