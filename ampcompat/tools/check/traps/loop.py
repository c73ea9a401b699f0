"""Traps of the training loop: backward passes and clipping beside ``amp.scale_loss``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.source import SCOPES, Source, argument, called, names_in, once
from ampcompat.tools.check.together import exclusive, on_other_sides
from ampcompat.tools.check.traps.repository import Repository

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
# A branch under such a test is the other way of training, not a mistake in this one.
SWITCH = re.compile(r"fp_?16|amp|apex|half|mixed|precision|bf16|opt_level|scaler", re.IGNORECASE)
With: TypeAlias = ast.With | ast.AsyncWith


class Blocks:
    """The ``scale_loss`` blocks of one function, and what is asked of other statements beside them."""

    def __init__(self, source: Source, scope: ast.AST, blocks: list[With]) -> None:
        self.source, self.scope, self.blocks = source, scope, blocks
        self.inside = {id(node) for block in blocks for node in source.within(block)}
        self.first_return = min(self._lines_of_returns(), default=None)

    def _lines_of_returns(self) -> Iterator[int]:
        """The lines of branches that hold a block and leave the iteration: what follows trains in the other way."""
        for block in self.blocks:
            for outer in self.source.ancestors(block):
                if isinstance(outer, SCOPES):
                    break
                if isinstance(outer, ast.If) and isinstance(outer.body[-1], ast.Return | ast.Continue):
                    yield outer.lineno

    def hold(self, node: ast.AST) -> bool:
        """Whether ``node`` is in one of the blocks."""
        return id(node) in self.inside

    def exclude(self, node: ast.AST) -> bool:
        """Whether the tests around say that ``node`` is the other way of training."""
        if any(on_other_sides(self.source, node, block) for block in self.blocks):
            return True
        return all(exclusive(self.source, node, block) for block in self.blocks)

    def concern(self, node: ast.AST) -> bool:
        """Whether ``node`` runs in the same function beside a block."""
        return not self.hold(node) and self.source.scope(node) is self.scope and not self.exclude(node)

    def return_before(self, node: ast.AST) -> bool:
        """Whether a branch that holds a block leaves the iteration above ``node`` (``with ...; return``)."""
        return self.first_return is not None and self.first_return < getattr(node, "lineno", 0)


@once
def _blocks_by_function(source: Source) -> list[Blocks]:
    found: dict[ast.AST, list[With]] = {}
    for block in source.scaled_blocks():
        found.setdefault(source.scope(block), []).append(block)
    return [Blocks(source, scope, blocks) for scope, blocks in found.items()]


def _clips(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [node for node in nodes if isinstance(node, ast.Call) and called(node) in CLIPS and node.args]


def _of_model(call: ast.Call) -> bool:
    given = call.args[0]
    return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"


def switched(source: Source, node: ast.AST) -> bool:
    """Whether ``node`` runs only on one side of a test on the precision in use."""
    for parent in source.ancestors(node):
        if isinstance(parent, SCOPES):
            return False
        if isinstance(parent, ast.If | ast.IfExp) and _names_precision(parent.test):
            return True
    return False


def _names_precision(test: ast.expr) -> bool:
    names = (getattr(part, "id", None) or getattr(part, "attr", None) or "" for part in ast.walk(test))
    return any(map(SWITCH.search, names))


def clip_of_model_params(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping ``model.parameters()`` where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    if not repository.may_run_at("O2", "O5"):
        return
    level = WARNING if repository.levels is None else ERROR
    note = "at O2 the optimizer steps master parameters; clip amp.master_params(optimizer) instead"
    mastered = set(source.calls_to("apex.amp.master_params"))
    for blocks in _blocks_by_function(source):
        nodes = source.within(blocks.scope)
        # An if/else on the precision in use: one side with master_params, the other without.
        if mastered and not mastered.isdisjoint(nodes):
            continue
        for call in _clips(nodes):
            if _of_model(call) and not blocks.hold(call) and not blocks.exclude(call):
                yield source.finding(call, "trap", "clip_of_model_params", level, note)


def clip_of_scaled_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping inside the ``scale_loss`` block, where gradients still carry the loss scale.

    The limit is then up to 65536 times too tight. Clip after the block.
    """
    for block in source.scaled_blocks():
        for call in _clips(source.within(block)):
            note = "gradients are scaled until the scale_loss block ends; clip after the block"
            yield source.finding(call, "trap", "clip_of_scaled_gradients", ERROR, note)


def unscaled_backward(source: Source, repository: Repository) -> Iterator[Finding]:
    """``loss.backward()`` next to ``scale_loss`` in one function, with no switch between the two.

    Its gradients lack the scale: in half, small ones vanish, and at O2 masters get none of them. Give the loss to
    ``amp.scale_loss`` as well.
    """
    for blocks in _blocks_by_function(source):
        losses = _Losses(source, blocks)
        for call, name in _backwards(source.within(blocks.scope)):
            if blocks.concern(call) and not switched(source, call) and not blocks.return_before(call):
                note = f"{name} is not scaled; give it to amp.scale_loss and call backward on what that yields"
                # Of a network beside amp's, stepped by an optimizer of its own, it is right.
                level = ERROR if losses.train_managed(name) else WARNING
                yield source.finding(call, "trap", "unscaled_backward", level, note)


def _backwards(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """Calls of ``loss.backward()``, with the name of the loss.

    ``engine.backward(loss)`` and ``scaler.scale(loss).backward()`` are other tools' ways.
    """
    for call in nodes:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and not call.args:
            loss = dotted(call.func.value)
            if loss and call.func.attr == "backward":
                yield call, loss


class _Losses:
    """Which losses of a function train a model that ``initialize`` was given."""

    def __init__(self, source: Source, blocks: Blocks) -> None:
        scaled = [item.context_expr for block in blocks.blocks for item in block.items]
        self.scaled = {dotted(call.args[0]) for call in scaled if isinstance(call, ast.Call) and call.args}
        assignments = [node for node in source.kind(ast.Assign) if source.scope(node) is blocks.scope]
        self.computed: set[str] = set()  # names that an assignment computes from others
        given = [argument(call, 0, "models") for call in source.calls_to("apex.amp.initialize")]
        self.of_models = set[str]().union(*map(names_in, filter(None, given)))  # the models, and what they go into
        before = -1
        while len(self.of_models) > before:
            before = len(self.of_models)
            for node in assignments:
                targets = set[str]().union(*map(names_in, node.targets))
                used = names_in(node.value)
                self.computed |= {target for target in targets if used - {target}}
                if used & self.of_models:
                    self.of_models |= targets

    def train_managed(self, loss: str) -> bool:
        """Whether a loss is one that is scaled elsewhere, or is computed with such a model.

        Where nothing tells what computes it, it counts as the model's.
        """
        return loss in self.scaled or loss not in self.computed or loss in self.of_models


def backward_of_wrong_loss(source: Source, repository: Repository) -> Iterator[Finding]:
    """``loss.backward()`` in the block of ``amp.scale_loss(loss, optimizer) as scaled_loss``.

    The block then divides gradients by a scale that they never had. Call backward on what the block yields.
    """
    for block in source.scaled_blocks():
        for item in block.items:
            entry, scaled = item.context_expr, dotted(item.optional_vars)
            given = dotted(entry.args[0]) if isinstance(entry, ast.Call) and entry.args else ""
            for call, loss in _backwards(source.within(block)):
                if loss == given and loss != scaled:
                    right = scaled or "scaled_loss"
                    note = f"the block unscales gradients that were never scaled; call {right}.backward()"
                    yield source.finding(call, "trap", "backward_of_wrong_loss", ERROR, note)


def edit_of_model_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    if not repository.may_run_at("O2", "O5") or repository.levels is None:
        return
    note = "at O2 the optimizer steps masters: this changes nothing; edit amp.master_params(optimizer)"
    for blocks in _blocks_by_function(source):
        last = max(block.lineno for block in blocks.blocks)
        for loop in source.within(blocks.scope):
            if not isinstance(loop, ast.For) or loop.lineno < last or not _is_over_parameters(loop):
                continue
            if not blocks.concern(loop) or switched(source, loop):
                continue
            names = [n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
            found = next((n for n in ast.walk(loop) if _edits(n, names)), None)
            if found is not None:
                yield source.finding(found, "trap", "edit_of_model_gradients", ERROR, note)


def _is_over_parameters(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and called(loop.iter) in ("parameters", "named_parameters")


def _edits(node: ast.AST, names: list[str]) -> bool:
    """Whether a node changes ``p.grad`` for a ``p`` in ``names``, to something else than nothing."""
    grads = {f"{name}.grad{data}" for name in names for data in ("", ".data")}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        edits = method.endswith("_") and method not in ("zero_", "detach_", "requires_grad_")
        return edits and dotted(node.func.value) in grads
    if isinstance(node, ast.AugAssign):
        return dotted(node.target) in grads
    if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
        return any(dotted(target) in grads for target in node.targets)
    return False
