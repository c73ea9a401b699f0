"""Traps of the training loop: backward passes and clipping beside ``amp.scale_loss``."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from ampcompat.check.findings import ERROR, WARNING, Finding
from ampcompat.check.source import SCOPES, Source, argument, called, text
from ampcompat.check.together import exclusive
from ampcompat.check.traps.repository import Repository

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
# A branch under such a test is the other way of training, not a mistake in this one.
SWITCH = re.compile(r"fp_?16|amp|apex|half|mixed|precision|bf16|opt_level|scaler", re.IGNORECASE)


def _clips(source: Source, within: ast.AST) -> list[ast.Call]:
    return [n for n in source.within(within) if isinstance(n, ast.Call) and called(n) in CLIPS and n.args]


def _of_model(call: ast.Call) -> bool:
    given = call.args[0]
    return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"


def switched(source: Source, node: ast.AST) -> bool:
    """Whether ``node`` runs only on one side of a test on the precision in use."""
    for parent in source.ancestors(node):
        if isinstance(parent, SCOPES):
            return False
        if isinstance(parent, ast.If | ast.IfExp) and any(
            SWITCH.search(name)
            for part in ast.walk(parent.test)
            for name in [getattr(part, "id", None) or getattr(part, "attr", None) or ""]
        ):
            return True
    return False


def _functions_that_scale(source: Source) -> dict[ast.AST, list[ast.With | ast.AsyncWith]]:
    found: dict[ast.AST, list[ast.With | ast.AsyncWith]] = {}
    for block in source.scaled_blocks():
        found.setdefault(source.scope(block), []).append(block)
    return found


def clip_of_model_params(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping ``model.parameters()`` where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    if not repository.may_run_at("O2", "O5"):
        return
    certain = repository.levels is not None
    for scope, blocks in _functions_that_scale(source).items():
        inside = {id(n) for block in blocks for n in source.within(block)}
        # An if/else on the precision in use: one side with master_params, the other without.
        mastered = source.calls_to("apex.amp.master_params")
        if mastered and not set(mastered).isdisjoint(source.within(scope)):
            continue
        for call in _clips(source, scope):
            if (
                _of_model(call)
                and id(call) not in inside
                and not (_in_else_of(source, call, blocks) or _exclusive(source, call, blocks))
            ):
                level = ERROR if certain else WARNING
                note = "at O2 the optimizer steps master parameters; clip amp.master_params(optimizer) instead"
                yield source.finding(call, "trap", "clip_of_model_params", level, note)


def clip_of_scaled_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """Clipping inside the ``scale_loss`` block, where gradients still carry the loss scale.

    The limit is then up to 65536 times too tight. Clip after the block.
    """
    for block in source.scaled_blocks():
        for call in _clips(source, block):
            note = "gradients are scaled until the scale_loss block ends; clip after the block"
            yield source.finding(call, "trap", "clip_of_scaled_gradients", ERROR, note)


def _exclusive(source: Source, node: ast.AST, blocks: list[ast.With | ast.AsyncWith]) -> bool:
    """Whether ``node`` never runs in an execution that scales a loss, by the tests around them."""
    return all(exclusive(source, node, block) for block in blocks)


def _in_else_of(source: Source, node: ast.AST, blocks: list[ast.With | ast.AsyncWith]) -> bool:
    """Whether ``node`` and each scale_loss block are on different sides of some ``if``, or a test switches ``node``."""
    above = [node, *source.ancestors(node)]
    for child, parent in itertools.pairwise(above):
        if isinstance(parent, ast.If | ast.Try):
            side = parent.body if child in parent.body else None
            others = [s for s in ast.iter_child_nodes(parent) if s is not child and (side is None or s not in side)]
            if any(n in blocks for other in others for n in ast.walk(other)):
                return True
    return False


def _ends_before(source: Source, node: ast.AST, blocks: list[ast.With | ast.AsyncWith]) -> bool:
    """Whether a block leaves the iteration right after it (``with ...; return``): what follows is the other way."""
    for block in blocks:
        for outer in [block, *source.ancestors(block)]:
            if isinstance(outer, SCOPES):
                break
            leaves = isinstance(outer, ast.If) and isinstance(outer.body[-1], ast.Return | ast.Continue)
            if leaves and getattr(outer, "lineno", 0) < getattr(node, "lineno", 0):
                return True
    return False


def unscaled_backward(source: Source, repository: Repository) -> Iterator[Finding]:
    """``loss.backward()`` next to ``scale_loss`` in one function, with no switch between the two.

    Its gradients lack the scale: in half, small ones vanish, and at O2 masters get none of them. Give the loss to
    ``amp.scale_loss`` as well.
    """
    for scope, blocks in _functions_that_scale(source).items():
        inside = {id(n) for block in blocks for n in source.within(block)}
        for call in source.within(scope):
            if not isinstance(call, ast.Call) or id(call) in inside or source.scope(call) is not scope:
                continue
            # `engine.backward(loss)` and `scaler.scale(loss).backward()` are other tools' ways.
            if called(call) != "backward" or call.args or not isinstance(call.func, ast.Attribute):
                continue
            name = text(call.func.value)
            if not name or switched(source, call) or _in_else_of(source, call, blocks):
                continue
            if _exclusive(source, call, blocks):
                continue
            if not _ends_before(source, call, blocks):
                note = f"{name} is not scaled; give it to amp.scale_loss and call backward on what that yields"
                # Of a network beside amp's, stepped by an optimizer of its own, it is right.
                level = ERROR if _trains_managed(source, scope, name, blocks) else WARNING
                yield source.finding(call, "trap", "unscaled_backward", level, note)


def _trains_managed(source: Source, scope: ast.AST, loss: str, blocks: list[ast.With | ast.AsyncWith]) -> bool:
    """Whether a loss is one that is scaled elsewhere, or is computed with a model that ``initialize`` was given."""
    scaled = [item.context_expr for block in blocks for item in block.items]
    if loss in {text(call.args[0]) for call in scaled if isinstance(call, ast.Call) and call.args}:
        return True
    given = [argument(call, 0, "models") for call in source.calls_to("apex.amp.initialize")]
    models = {text(node) for models in given if models is not None for node in ast.walk(models)} - {""}
    names, before = {loss}, 0
    while before != len(names):
        before = len(names)
        for node in source.kind(ast.Assign):
            targets = (text(part) for target in node.targets for part in ast.walk(target))
            if source.scope(node) is scope and not names.isdisjoint(targets):
                names |= set(map(text, ast.walk(node.value))) - {""}
    # Where nothing tells what computes it, it counts as the model's.
    return names == {loss} or not names.isdisjoint(models)


def backward_of_wrong_loss(source: Source, repository: Repository) -> Iterator[Finding]:
    """``loss.backward()`` in the block of ``amp.scale_loss(loss, optimizer) as scaled_loss``.

    The block then divides gradients by a scale that they never had. Call backward on what the block yields.
    """
    for block in source.scaled_blocks():
        for item in block.items:
            call, scaled = item.context_expr, text(item.optional_vars)
            if not isinstance(call, ast.Call) or not call.args or not text(call.args[0]):
                continue
            loss = text(call.args[0])
            for inner in ast.walk(block):
                if not isinstance(inner, ast.Call) or called(inner) != "backward" or inner.args:
                    continue
                if isinstance(inner.func, ast.Attribute) and text(inner.func.value) == loss != scaled:
                    right = scaled or "scaled_loss"
                    note = f"the block unscales gradients that were never scaled; call {right}.backward()"
                    yield source.finding(inner, "trap", "backward_of_wrong_loss", ERROR, note)


def edit_of_model_gradients(source: Source, repository: Repository) -> Iterator[Finding]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    if not repository.may_run_at("O2", "O5") or repository.levels is None:
        return
    for scope, blocks in _functions_that_scale(source).items():
        inside = {id(n) for block in blocks for n in source.within(block)}
        last = max(block.lineno for block in blocks)
        for loop in source.within(scope):
            if (
                not isinstance(loop, ast.For)
                or id(loop) in inside
                or loop.lineno < last
                or source.scope(loop) is not scope
            ):
                continue
            names = [n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
            over = loop.iter
            if not isinstance(over, ast.Call) or called(over) not in ("parameters", "named_parameters"):
                continue
            if switched(source, loop) or _in_else_of(source, loop, blocks) or _exclusive(source, loop, blocks):
                continue
            found = next((n for n in ast.walk(loop) if _edits(n, names)), None)
            if found is not None:
                note = "at O2 the optimizer steps masters: this changes nothing; edit amp.master_params(optimizer)"
                yield source.finding(found, "trap", "edit_of_model_gradients", ERROR, note)


def _edits(node: ast.AST, names: list[str]) -> bool:
    """Whether a node changes ``p.grad`` for a ``p`` in ``names``, to something else than nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changed = text(node.func.value)
        method = node.func.attr
        of_grad = any(changed in (f"{name}.grad", f"{name}.grad.data") for name in names)
        return of_grad and method.endswith("_") and method not in ("zero_", "detach_", "requires_grad_")
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    empties = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    grads = {f"{name}.grad{data}" for name in names for data in ("", ".data")}
    return not empties and any(text(target) in grads for target in targets)
