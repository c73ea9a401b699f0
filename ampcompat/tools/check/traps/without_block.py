"""The trap of a backward pass without a block of ``amp.scale_loss``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import is_without_amp
from ampcompat.tools.check.findings import WARNING
from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.settings import Setting, initializations
from ampcompat.tools.check.source import Source, argument
from ampcompat.tools.check.traps.blocks import blocks_by_function, follows_a_block, yielded
from ampcompat.tools.check.traps.grades import perhaps_with_masters, with_masters
from ampcompat.tools.check.traps.other_models import is_loss_of_another_model

#: Parts of names by which a file may scale losses in another way than by a ``with`` statement.
OTHER_SCALING = ("scale_loss", "loss_scaler", "_amp_backward", "unscale", "FP16_Optimizer", "GradScaler")


def unscaled_backward(source: Source) -> Iterator[Mistake]:
    """``loss.backward()`` in a file that initializes an optimizer and scales no loss, or below the block of another.

    With masters nothing is trained: they get their gradients at the end of a block.
    """
    yield from _after_a_block(source)
    calls = [call for call in initializations(source) if _has_optimizer(call)]
    if not calls or _scales_otherwise(source):
        return
    initializing = {_part_around(source, call) for call in calls}
    note = "without a scale_loss block the loss is not scaled, and masters get no gradients; write"
    note += " `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
    for backward in source.calls_named("backward"):
        if not isinstance(backward.func, ast.Attribute) or backward.args or is_without_amp(source, backward):
            continue
        is_near = _part_around(source, backward) in initializing
        # Code further away may be called where amp is off.
        yield Mistake(backward, note, _with_masters_perhaps_with_scale if is_near else _at_most_a_warning)


def _after_a_block(source: Source) -> Iterator[Mistake]:
    """A second backward pass below a block, as of a loss for adversarial inputs."""
    note = "this loss has no scale_loss block, so that masters get no gradients of it; give it one of its own"
    blocks = [block for found in blocks_by_function(source).values() for block in found]
    scaled = {name for block in blocks for name in yielded(block)}
    for backward in source.calls_named("backward"):
        loss = dotted(backward.func).rpartition(".")[0]
        if not loss or loss in scaled or backward.args or is_without_amp(source, backward):
            continue
        if not follows_a_block(source, backward) or source.bindings.is_native:
            continue
        if not is_loss_of_another_model(source, backward.func):
            yield Mistake(backward, note, perhaps_with_masters)


def _scales_otherwise(source: Source) -> bool:
    """Whether the code, comments and texts aside, names anything by which losses are scaled."""
    names: set[str] = set()
    for node in source.kind(ast.Name, ast.Attribute, ast.alias):
        names.add(str(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)))
    return any(word in name for name in names for word in OTHER_SCALING)


def _part_around(source: Source, node: ast.AST) -> ast.AST:
    """The class around a node, or else its function, or else the module."""
    around = next((part for part in source.ancestors(node) if isinstance(part, ast.ClassDef)), None)
    return around or source.scope(node)


def _has_optimizer(call: ast.Call) -> bool:
    given = argument(call, 1, "optimizers")
    return given is not None and not (isinstance(given, ast.Constant) and given.value is None)


def _with_masters_perhaps_with_scale(setting: Setting) -> str | None:
    """An error where nothing is trained; a warning where small gradients may be lost."""
    masters = with_masters(setting)
    if masters is None and setting.is_scaled is not False:
        return WARNING
    if masters is not None and setting.scales_elsewhere:
        return WARNING  # it may be the loss of a model without amp
    return masters


def _at_most_a_warning(setting: Setting) -> str | None:
    """A warning where a plain backward pass is a mistake."""
    return WARNING if _with_masters_perhaps_with_scale(setting) else None
