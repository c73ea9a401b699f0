"""Traps around ``amp.initialize``: what is handed to it, and what is done to that before or after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.check.findings import ERROR, WARNING, Finding
from ampcompat.check.source import Source, argument, called, number, text
from ampcompat.check.together import certain, conditions, evaluates, exclusive, rebound
from ampcompat.check.traps.repository import Repository

AMP = re.compile(r"fp_?16|\bamp|_amp|apex|half|mixed|precision", re.IGNORECASE)
COPY = re.compile(r"deepcopy\s*\([\s(]*(?:[\w.]*[._])?(?:optim|optimizer|opt)\b")
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
    found = []
    for call in source.calls_to("apex.amp.initialize"):
        given = argument(call, 0, "models")
        models = given.elts if isinstance(given, ast.List | ast.Tuple) else [given] if given is not None else []
        found += [(call, model) for model in models]
    return found


def _models(source: Source) -> list[tuple[ast.Call, str]]:
    """Those of the models that are given by name."""
    return [(call, name) for call, model in _given(source) if (name := text(model))]


def _cast_to_half(source: Source, node: ast.AST) -> ast.Call | None:
    """The cast in ``Net().half().cuda()``, ``net.to(torch.float16)`` or ``network_to_half(net)``."""
    while isinstance(node, ast.Call):
        symbol = source.apex(node.func) or ""
        if symbol in ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network") and node.args:
            return node
        if not isinstance(node.func, ast.Attribute):
            return None
        dtypes = [text(a).rpartition(".")[2] for a in (*node.args, *(k.value for k in node.keywords))]
        if (node.func.attr == "half" and not node.args) or (
            node.func.attr == "to" and {"half", "float16", "bfloat16"} & set(dtypes)
        ):
            return node
        node = node.func.value
    return None


def half_by_hand(source: Source, repository: Repository) -> Iterator[Finding]:
    """``model.half()`` on a model that amp manages.

    Before ``initialize`` it is refused: the float32 weights that masters and O1 need are already gone. Afterwards it
    rounds the weights away. ``opt_level="O2"`` (or O3) is the way to ask for a half model.
    """
    casts: dict[int, tuple[ast.AST, str]] = {}
    for call, model in _given(source):
        if cast := _cast_to_half(source, model):
            casts[id(cast)] = cast, "a model"
        name = text(model)
        for part in source.kind(ast.Expr, ast.Assign) if name else ():
            # `model.half()` for what it does to the model, and `model = Net().half()`.
            if isinstance(part, ast.Expr | ast.Assign) and source.scope(part) is source.scope(call):
                cast = _cast_to_half(source, part.value)
                if exclusive(source, part, call) or evaluates(source, part):
                    continue
                if rebound(source, name, part, call) or _cast_back(source, name, part, call):
                    continue
                targets = [text(t) for t in part.targets] if isinstance(part, ast.Assign) else []
                if cast is not None and (name in targets or _casts(source, cast) == name):
                    casts[id(cast)] = cast, name
    for found, name in casts.values():
        note = f"{name} is given to amp.initialize, which needs it in float32; drop the cast and choose O2 or O3"
        yield source.finding(found, "trap", "half_by_hand", ERROR, note)


def _cast_back(source: Source, name: str, cast: ast.AST, initialize: ast.Call) -> bool:
    """Whether ``name.float()`` stands between a cast to half and ``initialize``."""
    between = range(getattr(cast, "lineno", 0) + 1, initialize.lineno)
    return any(c.lineno in between and text(c.func) in (f"{name}.float", f"{name}.double") for c in source.calls)


def _casts(source: Source, cast: ast.Call) -> str:
    """The name of what a cast is applied to."""
    method = isinstance(cast.func, ast.Attribute) and source.apex(cast.func) is None
    return text(cast.func.value if method and isinstance(cast.func, ast.Attribute) else cast.args[0])


def wrapped_before_initialize(source: Source, repository: Repository) -> Iterator[Finding]:
    """A model wrapped in DistributedDataParallel or DataParallel before ``initialize`` is refused: wrap it after."""
    for initialize, name in _models(source):
        for node in source.kind(ast.Assign):
            if not isinstance(node.value, ast.Call):
                continue
            same = source.scope(node) is source.scope(initialize) and name in map(text, node.targets)
            before = node.lineno < initialize.lineno and not exclusive(source, node, initialize)
            before = before and not rebound(source, name, node, initialize)
            if same and before and called(node.value) in WRAPPERS and not _amp_is_off(source, node):
                level = ERROR if certain(source, node, initialize) else WARNING
                note = f"{name} is wrapped before amp.initialize, which refuses it; initialize first, then wrap"
                yield source.finding(node, "trap", "wrapped_before_initialize", level, note)


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
    for call in source.calls_to("apex.amp.initialize"):
        level = argument(call, 3, "opt_level")
        if not (isinstance(level, ast.Constant) and level.value == "O3"):
            continue
        given = argument(call, 1, "optimizers")
        names = {text(part) for part in (given.elts if isinstance(given, ast.List | ast.Tuple) else [given])} - {""}
        made = [given] if isinstance(given, ast.Call) else []
        for node in source.kind(ast.Assign):
            if not isinstance(node.value, ast.Call):
                continue
            same = source.scope(node) is source.scope(call) and not exclusive(source, node, call)
            targets = names & set(map(text, node.targets))
            if same and targets and not any(rebound(source, name, node, call) for name in targets):
                made.append(node.value)
        for adam in made:
            if called(adam) not in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam") or source.apex(adam.func):
                continue
            eps = number(argument(adam, 3, "eps"))
            if argument(adam, 3, "eps") is None or (eps is not None and 0 < eps < 2.0**-25):
                name, value = called(adam), eps or 1e-8
                note = f"at O3 {name} keeps its state in half, where eps={value:g} is 0; pass eps=1e-4 or use O2"
                yield source.finding(adam, "trap", "adam_eps_in_half", ERROR, note)


def deepcopy_of_optimizer(source: Source, repository: Repository) -> Iterator[Finding]:
    """``copy.deepcopy(optimizer)`` copies the parameters along: the copy steps tensors that no model holds.

    Build a new optimizer over the model's parameters and load the ``state_dict()`` of the first.
    """
    if "deepcopy" not in source.code:
        return
    optimizers = {text(argument(c, 1, "optimizers")) for c in source.calls_to("apex.amp.initialize")} - {""}
    for call in source.calls:
        name = text(call.args[0]) if call.args else ""
        if called(call) != "deepcopy" or not name:
            continue
        if name in optimizers or re.fullmatch(r"(.*[._])?(optim|optimizer|opt)", name):
            note = f"the copy of {name} updates parameters of its own; build a new one and load its state_dict()"
            yield source.finding(call, "trap", "deepcopy_of_optimizer", WARNING, note)
