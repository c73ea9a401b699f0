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
        for call in _calls_that_run(source, block, _is_one_of({f"{name}.step" for name in _optimizers(block)})):
            yield Hit(
                call, "gradients are unscaled at the end of the scale_loss block, and this is refused; step after it"
            )


def _is_one_of(names: set[str]) -> Callable[[ast.Call], bool]:
    return lambda call: dotted(call.func) in names


def _optimizers(block: With) -> set[str]:
    """The names of the optimizers that a block is given."""
    calls = [item.context_expr for item in block.items if isinstance(item.context_expr, ast.Call)]
    return {dotted(optimizer) for call in calls for optimizer in listed(argument(call, 1, "optimizers"))} - {""}


def _calls_that_run(source: Source, block: With, is_wanted: Callable[[ast.Call], bool]) -> Iterator[ast.Call]:
    """The calls in a block that are wanted, or that run a wanted call by functions of the file."""
    wanted_by_function: dict[ast.AST, ast.Call | None] = {}
    for node in source.within(block):
        if not isinstance(node, ast.Call):
            continue
        found = node if is_wanted(node) else None
        function = source.function_of(node)
        if found is None and function is not None:
            if function not in wanted_by_function:
                wanted_by_function[function] = _wanted_call(source, function, is_wanted)
            found = wanted_by_function[function]
        if found is not None and not contradict(source, block, found):
            yield node


def _wanted_call(source: Source, function: ast.AST, is_wanted: Callable[[ast.Call], bool]) -> ast.Call | None:
    """The first wanted call that a function runs, by at most :data:`DEPTH` functions.

    One with a block of its own is left out: it may run the call after that.
    """
    seen: set[ast.AST] = set()
    functions = [function]
    for _ in range(DEPTH):
        called: list[ast.AST] = []
        for one in functions:
            if one in seen or one in blocks_by_function(source):
                continue
            seen.add(one)
            for node in source.within(one):
                if isinstance(node, ast.Call) and is_wanted(node):
                    return node
                inner = source.function_of(node) if isinstance(node, ast.Call) else None
                called += [] if inner is None else [inner]
        functions = called
    return None
