"""Traps inside a block of ``amp.scale_loss``, where gradients are multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import contradict
from ampcompat.tools.check.calls import calls_by_function, function_of
from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.source import Source, argument, called, once
from ampcompat.tools.check.traps.blocks import CLIPS, With, blocks_by_function
from ampcompat.tools.check.traps.grades import with_masters_or_scale, with_scale


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
    if called(call) in CLIPS and call.args:
        return True
    function = function_of(source, call)
    clips = _clips_by_function(source).get(function, []) if function is not None else []
    return any(not contradict(source, block, clip) for clip in clips)


@once
def _clips_by_function(source: Source) -> dict[ast.AST, list[ast.Call]]:
    """The clips that a function runs, itself or by the functions that it calls.

    A function with a block of its own is left out: it may clip after that.
    """
    found: dict[ast.AST, list[ast.Call]] = {}
    for clip in source.calls_named(*CLIPS):
        if clip.args:
            waiting = [source.scope(clip)]
            for function in waiting:  # grows on the way
                clips = found.setdefault(function, [])
                if function not in blocks_by_function(source) and clip not in clips:
                    clips.append(clip)
                    waiting += map(source.scope, calls_by_function(source).get(function, []))
    return found


def step_in_block(source: Source) -> Iterator[Mistake]:
    """``optimizer.step()`` inside its ``scale_loss`` block: gradients are unscaled at its end."""
    for block in source.scaled_blocks():
        stepped = _optimizers(block)
        for node in source.within(block):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            if name.removesuffix(".step") in stepped and name.endswith(".step"):
                note = "gradients are unscaled at the end of the scale_loss block, and this is refused; step after it"
                yield Mistake(node, note, with_masters_or_scale)


def _optimizers(block: With) -> set[str]:
    """The names of the optimizers that a block is given."""
    found: set[str] = set()
    for item in block.items:
        given = argument(item.context_expr, 1, "optimizers") if isinstance(item.context_expr, ast.Call) else None
        listed = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
        found |= {dotted(optimizer) for optimizer in listed}
    return found - {""}


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
