"""Traps inside a block of ``amp.scale_loss``, where gradients are multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted, parameters
from ampcompat.tools.check.branches import contradict
from ampcompat.tools.check.calls import Definition, calls_by_function, function_of
from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.source import Source, argument, called, once
from ampcompat.tools.check.traps.blocks import With, blocks_by_function, clips, is_clip
from ampcompat.tools.check.traps.grades import with_masters_or_scale, with_scale

#: Calls of functions in functions that are followed until a step is given up.
MOST_CALLS = 3


def clip_of_scaled_gradients(source: Source) -> Iterator[Mistake]:
    """Clipping inside the ``scale_loss`` block, where gradients still carry the loss scale.

    The limit is then up to 65536 times too tight. Clip after the block.
    """
    note = "gradients are scaled until the scale_loss block ends; clip after the block"
    for block in source.scaled_blocks():
        for node in source.within(block):
            if isinstance(node, ast.Call) and _clips(source, block, node):
                yield Mistake(node, note, with_scale)


def _clips(source: Source, block: With, call: ast.Call) -> bool:
    """Whether a call in a block clips gradients, itself or by functions of the same file."""
    if is_clip(source, call) and call.args:
        return True
    function = function_of(source, call)
    found = _clips_by_function(source).get(function, []) if function is not None else []
    return any(not contradict(source, block, clip) for clip in found)


@once
def _clips_by_function(source: Source) -> dict[ast.AST, list[ast.Call]]:
    """The clips that a function runs, itself or by the functions that it calls.

    A function with a block of its own is left out: it may clip after that.
    """
    found: dict[ast.AST, list[ast.Call]] = {}
    for clip in clips(source):
        if clip.args:
            waiting = [source.scope(clip)]
            for function in waiting:  # grows on the way
                known = found.setdefault(function, [])
                if function not in blocks_by_function(source) and clip not in known:
                    known.append(clip)
                    waiting += map(source.scope, calls_by_function(source).get(function, []))
    return found


def step_in_block(source: Source) -> Iterator[Mistake]:
    """``optimizer.step()`` inside its ``scale_loss`` block: gradients are unscaled at its end."""
    note = "gradients are unscaled at the end of the scale_loss block, and this is refused; step after it"
    for block in source.scaled_blocks():
        optimizers = _optimizers(block)
        for node in source.within(block):
            if not isinstance(node, ast.Call):
                continue
            steps = _steps(source, node, optimizers, MOST_CALLS)
            if any(not contradict(source, block, step) for step in steps):
                yield Mistake(node, note, with_masters_or_scale)


def _steps(source: Source, call: ast.Call, optimizers: frozenset[str], most_calls: int) -> list[ast.Call]:
    """The steps of some optimizers that a call is, or that it runs by functions of the same file."""
    if called(call) == "step" and dotted(call.func).removesuffix(".step") in optimizers:
        return [call]
    function = function_of(source, call)
    has_own_block = function in blocks_by_function(source)  # it may step after that
    if function is None or has_own_block or not most_calls:
        return []
    return _steps_in(source, function, _named_in(function, call, optimizers), most_calls - 1)


@once
def _steps_in(source: Source, function: Definition, optimizers: frozenset[str], most_calls: int) -> list[ast.Call]:
    """The steps of some optimizers that a function makes."""
    steps: dict[ast.Call, None] = {}
    for node in source.within(function):
        if isinstance(node, ast.Call) and optimizers:
            steps.update(dict.fromkeys(_steps(source, node, optimizers, most_calls)))
    return list(steps)


def _named_in(function: Definition, call: ast.Call, optimizers: frozenset[str]) -> frozenset[str]:
    """The names that a function has for what its caller calls ``optimizers``: its parameters, and attributes."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(call.func, ast.Attribute):  # `self`
        names = names[1:]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    kept = {name for name in optimizers if name.partition(".")[0] not in parameters(function) - {"self"}}
    return frozenset(kept | {name for name, value in given.items() if dotted(value) in optimizers})


def _optimizers(block: With) -> frozenset[str]:
    """The names of the optimizers that a block is given."""
    found: set[str] = set()
    for item in block.items:
        given = argument(item.context_expr, 1, "optimizers") if isinstance(item.context_expr, ast.Call) else None
        listed = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
        found |= {dotted(optimizer) for optimizer in listed}
    return frozenset(found - {""})


def backward_of_wrong_loss(source: Source) -> Iterator[Mistake]:
    """``loss.backward()`` in the block of ``amp.scale_loss(loss, optimizer) as scaled_loss``.

    The block then divides gradients by a scale that they never had. Call backward on what the block yields.
    """
    for block in source.scaled_blocks():
        for item in block.items:
            entry, scaled = item.context_expr, dotted(item.optional_vars)
            given = dotted(entry.args[0]) if isinstance(entry, ast.Call) and entry.args else ""
            if not given or given == scaled:
                continue
            note = f"the block unscales gradients that were never scaled; call {scaled or 'scaled_loss'}.backward()"
            for node in source.within(block):
                if isinstance(node, ast.Call) and dotted(node.func) == f"{given}.backward":
                    yield Mistake(node, note, with_scale)
