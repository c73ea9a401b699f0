"""Rules inside a block of ``amp.scale_loss``, where gradients are multiplied by the loss scale."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import contradict
from ampcompat.tools.check.rules.blocks import With, blocks_by_function, is_clip
from ampcompat.tools.check.rules.rule import Hit
from ampcompat.tools.check.source import Source, argument, listed

#: How many functions that call each other are looked into.
DEPTH = 3


def clip_of_scaled_gradients(source: Source) -> Iterator[Hit]:
    """Clipping inside the block: gradients still carry the loss scale, so that the limit is 65536 times too tight."""
    for block in source.scaled_blocks():
        for call in _calls_that_run(source, block, lambda call: is_clip(source, call)):
            yield Hit(call, "gradients are scaled until the scale_loss block ends; clip after the block")


def step_in_block(source: Source) -> Iterator[Hit]:
    """``optimizer.step()`` inside its block: gradients are unscaled at its end."""
    for block in source.scaled_blocks():
        steps = {f"{optimizer}.step" for optimizer in _optimizers(block)}
        for call in _calls_that_run(source, block, lambda call, steps=steps: dotted(call.func) in steps):  # type: ignore[misc]
            yield Hit(
                call, "gradients are unscaled at the end of the scale_loss block, and this is refused; step after it"
            )


def _optimizers(block: With) -> set[str]:
    """The names of the optimizers that a block is given."""
    calls = [item.context_expr for item in block.items if isinstance(item.context_expr, ast.Call)]
    return {dotted(optimizer) for call in calls for optimizer in listed(argument(call, 1, "optimizers"))} - {""}


def _calls_that_run(source: Source, block: With, is_wanted: Callable[[ast.Call], bool]) -> Iterator[ast.Call]:
    """The calls in a block that are wanted, or that run a wanted call by functions of the file."""
    for node in source.within(block):
        if not isinstance(node, ast.Call):
            continue
        found = _wanted_call(source, node, is_wanted, DEPTH)
        if found is not None and not contradict(source, block, found):
            yield node


def _wanted_call(source: Source, call: ast.Call, is_wanted: Callable[[ast.Call], bool], depth: int) -> ast.Call | None:
    """The wanted call that ``call`` is, or runs. A function with a block of its own may run one after that block."""
    if is_wanted(call):
        return call
    function = source.function_of(call) if depth else None
    if function is None or function in blocks_by_function(source):
        return None
    for node in source.within(function):
        found = _wanted_call(source, node, is_wanted, depth - 1) if isinstance(node, ast.Call) else None
        if found is not None:
            return found
    return None
