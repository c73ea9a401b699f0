"""Traps of the training loop: clipping, backward passes and steps at ``amp.scale_loss``."""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterator
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import conditions, contradict, exclusive, has_alternative
from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.settings import Setting, initializations
from ampcompat.tools.check.source import Source, argument, called, once

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
#: Parts of names by which a file may scale losses in another way than by a ``with`` statement.
OTHER_SCALING = ("scale_loss", "loss_scalers", "_amp_backward", "unscale", "FP16_Optimizer", "GradScaler")
With: TypeAlias = ast.With | ast.AsyncWith


# -- in which settings -------------------------------------------------------------------------------------------------
def _with_masters(setting: Setting) -> str | None:
    """An error where the optimizer steps masters."""
    if setting.masters is None:
        return WARNING
    return ERROR if setting.masters else None


def _with_scale(setting: Setting) -> str | None:
    """An error where gradients are multiplied by the loss scale."""
    if setting.is_scaled is None:
        return WARNING
    return ERROR if setting.is_scaled else None


def _with_masters_or_scale(setting: Setting) -> str | None:
    """An error where a block does anything to gradients at its end."""
    grades = (_with_masters(setting), _with_scale(setting))
    return ERROR if ERROR in grades else next(filter(None, grades), None)


def _with_masters_perhaps_with_scale(setting: Setting) -> str | None:
    """An error where nothing is trained; a warning where small gradients may be lost."""
    masters = _with_masters(setting)
    if masters is None and setting.is_scaled is not False:
        return WARNING
    if masters is not None and setting.scales_elsewhere:
        return WARNING  # it may be the loss of a model without amp
    return masters


def _at_most_a_warning(setting: Setting) -> str | None:
    """A warning where a plain backward pass is a mistake."""
    return WARNING if _with_masters_perhaps_with_scale(setting) else None


def _with_masters_if_it_runs(setting: Setting) -> str | None:
    """A warning where the optimizer steps masters, for code that may not run at such a level."""
    return WARNING if _with_masters(setting) else None


def _grade_after_block(source: Source, node: ast.AST) -> Grade:
    """How bad a change of the model's own gradients is: code under ``if opt_level == ...`` may know what it does."""
    asks_for_level = any("opt_level" in test.lower() for test, _ in conditions(source, node))
    return _with_masters_if_it_runs if asks_for_level else _with_masters


# -- after the block ---------------------------------------------------------------------------------------------------
def clip_of_model_params(source: Source) -> Iterator[Mistake]:
    """Clipping ``model.parameters()`` after a block, where the optimizer steps master parameters.

    At O2 the gradients that count are those of the float32 masters; clipping the model's half gradients after the
    block changes nothing. Clip ``amp.master_params(optimizer)``: right at every level.
    """
    note = "the optimizer steps master parameters, so that this changes nothing; clip amp.master_params(optimizer)"
    # A function that clips master_params too has a branch for each precision.
    clip_masters = {source.scope(call) for call in source.calls_to("apex.amp.master_params")}
    for call in source.calls_named(*CLIPS):
        if _is_of_model(call) and source.scope(call) not in clip_masters and _follows_a_block(source, call):
            yield Mistake(call, note, _grade_after_block(source, call))


def _is_of_model(call: ast.Call) -> bool:
    """Whether a call clips ``model.parameters()``."""
    given = call.args[0] if call.args else None
    return isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters"


def edit_of_model_gradients(source: Source) -> Iterator[Mistake]:
    """``p.grad.data.div_(n)`` over ``model.parameters()`` after the block, at O2: the masters' gradients are copies.

    The optimizer steps the float32 masters, whose gradients were taken when the block ended. Edit those of
    ``amp.master_params(optimizer)``, or edit inside the block.
    """
    note = "the optimizer steps masters, so that this changes nothing; edit amp.master_params(optimizer)"
    edit_masters = {source.scope(call) for call in source.calls_to("apex.amp.master_params")}
    for loop in source.kind(ast.For):
        if not isinstance(loop.iter, ast.Call) or called(loop.iter) not in ("parameters", "named_parameters"):
            continue
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        if edit is not None and source.scope(loop) not in edit_masters and _follows_a_block(source, loop):
            yield Mistake(edit, note, _grade_after_block(source, edit))


def _edited(node: ast.AST) -> str:
    """The name of the parameter whose gradient a node changes, to something else than nothing: ``p`` of ``p.grad``."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr.endswith("_") and node.func.attr not in ("zero_", "detach_", "requires_grad_"):
            changed = node.func.value
    elif isinstance(node, ast.AugAssign):
        changed = node.target
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
        changed = node.targets[0]
    name, _, attribute = dotted(changed).removesuffix(".data").rpartition(".")
    return name if attribute == "grad" else ""


def _follows_a_block(source: Source, node: ast.expr | ast.stmt) -> bool:
    """Whether ``node`` runs after a ``scale_loss`` block of its function, outside of it."""
    block = _block_above(_blocks_by_function(source).get(source.scope(node), []), node)
    return block is not None and block not in source.ancestors(node) and not exclusive(source, block, node)


@once
def _blocks_by_function(source: Source) -> dict[ast.AST, list[With]]:
    """The ``scale_loss`` blocks of each function, in the order of lines."""
    found: dict[ast.AST, list[With]] = {}
    for block in sorted(source.scaled_blocks(), key=lambda block: block.lineno):
        found.setdefault(source.scope(block), []).append(block)
    return found


def _block_above(blocks: list[With], node: ast.expr | ast.stmt) -> With | None:
    """The last of ``blocks`` that begins above ``node``."""
    above = bisect.bisect_left(blocks, node.lineno, key=lambda block: block.lineno)
    return blocks[above - 1] if above else None


def backward_after_block(source: Source) -> Iterator[Mistake]:
    """``scaled_loss.backward()`` below the block of ``amp.scale_loss(...) as scaled_loss``.

    The block has ended, so that nothing unscales these gradients or brings them to the masters.
    """
    for call in source.calls_named("backward"):
        scaled = dotted(call.func).rpartition(".")[0]
        block = _block_above(_blocks_by_function(source).get(source.scope(call), []), call)
        if block is None or scaled not in _yielded(block) or _is_in_block_that_yields(source, call, scaled):
            continue
        if not exclusive(source, block, call) and not _is_assigned_below(source, block, call, scaled):
            note = f"the block that unscales its gradients has ended; indent {scaled}.backward() into it"
            yield Mistake(call, note, _with_masters_or_scale)


def _yielded(block: With) -> set[str]:
    """The names of what a block yields."""
    return {dotted(item.optional_vars) for item in block.items if item.optional_vars is not None} - {""}


def _is_in_block_that_yields(source: Source, node: ast.AST, name: str) -> bool:
    around = source.ancestors(node)
    return any(isinstance(block, ast.With | ast.AsyncWith) and name in _yielded(block) for block in around)


def _is_assigned_below(source: Source, block: With, node: ast.Call, name: str) -> bool:
    """Whether ``name`` is given something else between a block and a node."""
    for statement in source.kind(ast.Assign):
        if block.lineno < statement.lineno <= node.lineno and name in map(dotted, statement.targets):
            return True
    return False


# -- in the block ------------------------------------------------------------------------------------------------------
def clip_of_scaled_gradients(source: Source) -> Iterator[Mistake]:
    """Clipping inside the ``scale_loss`` block, where gradients still carry the loss scale.

    The limit is then up to 65536 times too tight. Clip after the block.
    """
    note = "gradients are scaled until the scale_loss block ends; clip after the block"
    for block in source.scaled_blocks():
        for node in source.within(block):
            if isinstance(node, ast.Call) and _clips(source, block, node):
                yield Mistake(node, note, _with_scale)


def _clips(source: Source, block: With, call: ast.Call) -> bool:
    """Whether a call in a block clips gradients, itself or by functions of the same file."""
    if called(call) in CLIPS and call.args:
        return True
    function = _function_of(source, call)
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
                if function not in _blocks_by_function(source) and clip not in clips:
                    clips.append(clip)
                    waiting += _callers(source).get(function, [])
    return found


@once
def _callers(source: Source) -> dict[ast.AST, list[ast.AST]]:
    """The functions that call a function of the same file."""
    found: dict[ast.AST, list[ast.AST]] = {}
    for call in source.calls:
        function = _function_of(source, call)
        if function is not None:
            found.setdefault(function, []).append(source.scope(call))
    return found


def _function_of(source: Source, call: ast.Call) -> ast.AST | None:
    """The function of the same file that a call runs: ``clip(...)``, or ``self.clip()`` of the class around it."""
    if isinstance(call.func, ast.Name):
        return _functions(source).get((source.tree, call.func.id))
    if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self":
        around = next((part for part in source.ancestors(call) if isinstance(part, ast.ClassDef)), None)
        return None if around is None else _functions(source).get((around, call.func.attr))
    return None


@once
def _functions(source: Source) -> dict[tuple[ast.AST, str], ast.AST]:
    """The functions of a module and of its classes, by what they are defined in and by name."""
    kinds: Iterator[ast.FunctionDef | ast.AsyncFunctionDef] = source.kind(ast.FunctionDef, ast.AsyncFunctionDef)
    return {(source.parents[function], function.name): function for function in kinds}


def step_in_block(source: Source) -> Iterator[Mistake]:
    """``optimizer.step()`` inside its ``scale_loss`` block: gradients are unscaled at its end."""
    for block in source.scaled_blocks():
        stepped = _optimizers(block)
        for node in source.within(block):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            if name.removesuffix(".step") in stepped and name.endswith(".step"):
                note = "gradients are unscaled at the end of the scale_loss block, and this is refused; step after it"
                yield Mistake(node, note, _with_masters_or_scale)


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
                    yield Mistake(node, note, _with_scale)


# -- without a block ---------------------------------------------------------------------------------------------------
def unscaled_backward(source: Source) -> Iterator[Mistake]:
    """``loss.backward()`` in a file that initializes an optimizer, and scales no loss anywhere.

    With masters nothing is trained: they get their gradients at the end of a block.
    """
    calls = [call for call in initializations(source) if _has_optimizer(call)]
    if not calls or _scales_otherwise(source):
        return
    initializing = {_part_around(source, call) for call in calls}
    note = "gradients come to the masters, and a scale to the loss, in a block alone; write"
    note += " `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
    for backward in source.calls_named("backward"):
        # In one of two branches it may be the one without amp.
        if not isinstance(backward.func, ast.Attribute) or backward.args or has_alternative(source, backward):
            continue
        is_near = _part_around(source, backward) in initializing
        # Code further away may be called where amp is off.
        yield Mistake(backward, note, _with_masters_perhaps_with_scale if is_near else _at_most_a_warning)


def _scales_otherwise(source: Source) -> bool:
    """Whether the code, comments and texts aside, names anything by which losses are scaled."""
    names: set[str] = set()
    for node in source.kind(ast.Name, ast.Attribute, ast.alias, ast.Constant):
        text = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if isinstance(node, ast.Constant) and node.value in OTHER_SCALING:
            text = node.value
        names.add(str(text))
    return any(word in name for name in names for word in OTHER_SCALING)


def _part_around(source: Source, node: ast.AST) -> ast.AST:
    """The class around a node, or else its function, or else the module."""
    around = next((part for part in source.ancestors(node) if isinstance(part, ast.ClassDef)), None)
    return around or source.scope(node)


def _has_optimizer(call: ast.Call) -> bool:
    given = argument(call, 1, "optimizers")
    return given is not None and not (isinstance(given, ast.Constant) and given.value is None)
