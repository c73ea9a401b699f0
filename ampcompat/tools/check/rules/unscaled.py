"""The rule of a backward pass of a loss that no block has scaled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import is_without_amp
from ampcompat.tools.check.initializations import initializing_calls
from ampcompat.tools.check.rules.rule import Hit
from ampcompat.tools.check.source import Source, argument

#: Parts of names by which a file may scale losses in another way than by a ``with`` statement.
OTHER_SCALING = ("scale_loss", "loss_scaler", "_amp_backward", "unscale", "FP16_Optimizer", "GradScaler")
NO_BLOCK = (
    "without a scale_loss block the loss is not scaled, and with masters nothing is trained; write"
    " `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
)


def unscaled_backward(source: Source) -> Iterator[Hit]:
    """``loss.backward()`` in the block of ``scaled_loss``, or in a file that initializes amp and has no block."""
    yield from _in_a_block(source)
    given = [(call, argument(call, 1, "optimizers")) for call in initializing_calls(source)]
    calls = [call for call, optimizers in given if optimizers is not None and not isinstance(optimizers, ast.Constant)]
    if not calls or _scales_otherwise(source):
        return
    scopes = [source.scope(call) for call in calls]
    for call in source.calls_named("backward"):
        if isinstance(call.func, ast.Attribute) and not call.args and not is_without_amp(source, call):
            yield Hit(call, NO_BLOCK, is_certain=source.scope(call) in scopes)


def _in_a_block(source: Source) -> Iterator[Hit]:
    """The block then divides gradients by a scale that they never had."""
    for block in source.scaled_blocks():
        for item in block.items:
            entry, scaled = item.context_expr, dotted(item.optional_vars)
            given = dotted(entry.args[0]) if isinstance(entry, ast.Call) and entry.args else ""
            if not given or given == scaled:
                continue
            for node in source.within(block):
                if isinstance(node, ast.Call) and dotted(node.func) == f"{given}.backward":
                    fix = f"call {scaled or 'scaled_loss'}.backward()"
                    yield Hit(node, f"the block unscales gradients that were never scaled; {fix}")


def _scales_otherwise(source: Source) -> bool:
    """Whether the file has a block, or names another way of scaling a loss."""
    names = [name.id for name in source.kind(ast.Name)]
    names += [attribute.attr for attribute in source.kind(ast.Attribute)]
    names += [alias.name for alias in source.kind(ast.alias)]
    return any(part in name for name in names for part in OTHER_SCALING)
