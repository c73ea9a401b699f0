"""The loop: scaled losses, steps, and gradients that are unscaled before they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import libcst as cst

from ampcompat.tools.migrate.native.control import is_beside, meeting
from ampcompat.tools.migrate.native.edits import Edits, Statement
from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import File, Function
from ampcompat.tools.migrate.native.gradients import clip_threshold, is_autograd, is_plain_clip
from ampcompat.tools.migrate.native.home import Home
from ampcompat.tools.migrate.native.initialize import never_scales
from ampcompat.tools.migrate.native.merge import in_brackets, one_line, scaled_loss
from ampcompat.tools.migrate.native.nodes import argument, descendants, elements, last_name
from ampcompat.tools.migrate.native.paths import Step, Walk
from ampcompat.tools.migrate.text import code_of

CLOSURE = (
    "GradScaler cannot step with a closure. Use bfloat16, which needs no scaling: dtype=torch.bfloat16 as an argument "
    "of mixed_precision; then this line is right as it is"
)
NO_BLOCK = "amp.scale_loss outside of a with statement; write {scaler}.scale({loss}).backward()"


def replace_losses(facts: Facts, home: Home, edits: Edits) -> None:
    """``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`` becomes one line."""
    for node in facts.file.of_type(cst.With):
        if any(_is_scaling(item, facts) for item in node.items):
            _replace_block(node, facts, home.scaler(facts.file.function(node)), edits)
    for call in facts.scaled:
        parent = facts.file.parents[call]
        if isinstance(parent, cst.WithItem):
            continue
        scaler = home.scaler(facts.file.function(call))
        outer = facts.file.parents[parent]
        if isinstance(parent, cst.Arg) and isinstance(outer, cst.Call) and last_name(outer.func) == "enter_context":
            edits.expressions[outer] = partial(_entered, scaler=scaler)
        else:
            loss = code_of(call.args[0].value) if call.args else "loss"
            edits.mark(facts.file.statement(call), NO_BLOCK.format(scaler=scaler, loss=loss))


def _is_scaling(item: cst.WithItem, facts: Facts) -> bool:
    return isinstance(item.item, cst.Call) and facts.symbol(item.item.func) in SCALE_LOSS and bool(item.item.args)


def _scaled(call: cst.Call, scaler: str) -> cst.BaseExpression:
    return cst.parse_expression(f"{scaler}.scale({code_of(call.args[0].value)})")


def _entered(call: Any, scaler: str) -> cst.BaseExpression:
    """The scaled loss of ``stack.enter_context(amp.scale_loss(loss, optimizer))``."""
    return _scaled(call.args[0].value, scaler)


def _replace_block(node: cst.With, facts: Facts, scaler: str, edits: Edits) -> None:
    scaling = [_is_scaling(item, facts) for item in node.items]
    simple = scaled_loss(node, facts)
    if simple is not None and not _is_read_elsewhere(node, facts.file):
        edits.statements[node] = lambda new: _one_line(new, scaler)
    else:
        edits.statements[node] = lambda new: _assigned(new, scaling, scaler)


def _is_read_elsewhere(node: cst.With, file: File) -> bool:
    """Whether the name of the scaled loss is read outside of its block."""
    name = node.items[0].asname
    if name is None or not isinstance(name.name, cst.Name):
        return name is not None
    inside = {id(inner) for inner in descendants(node)}
    for other in file.of_type(cst.Name):
        if other.value != name.name.value or id(other) in inside:
            continue
        if not _is_bound_by_block(other, file) and file.function(other) is file.function(node):
            return True
    return False


def _is_bound_by_block(name: cst.Name, file: File) -> bool:
    """Whether a name stands in another ``with`` that binds it."""
    for parent in file.ancestors(name):
        items = parent.items if isinstance(parent, cst.With) else ()
        if any(item.asname is not None and code_of(item.asname.name) == name.value for item in items):
            return True
    return False


def _one_line(block: Any, scaler: str) -> Sequence[Statement]:
    """``scaler.scale(loss).backward()`` for a block that does nothing else."""
    line: Any = block.body.body[0] if isinstance(block.body, cst.IndentedBlock) else one_line(block.body)
    backward = line.body[0].value
    scaled = _scaled(block.items[0].item, scaler)
    call = backward.with_changes(func=backward.func.with_changes(value=scaled))
    return [line.with_changes(body=[cst.Expr(call)])]


def _assigned(block: cst.With, scaling: Sequence[bool], scaler: str) -> Sequence[Statement]:
    """The block with ``scaled_loss = scaler.scale(loss)`` as a statement of its own."""
    body: list[Any] = []
    for item, scales in zip(block.items, scaling, strict=True):
        if scales and item.asname is not None and isinstance(item.item, cst.Call):
            body.append(cst.parse_statement(f"{code_of(item.asname.name)} = {code_of(_scaled(item.item, scaler))}"))
    body += block.body.body if isinstance(block.body, cst.IndentedBlock) else [one_line(block.body)]
    kept = [item for item, scales in zip(block.items, scaling, strict=True) if not scales]
    if not kept:
        return body
    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return [block.with_changes(items=kept, body=cst.IndentedBlock(body))]


def replace_backward(facts: Facts, walk: Walk, home: Home, edits: Edits) -> None:
    """A plain ``loss.backward()`` whose gradients are stepped together with scaled ones is scaled, too."""
    for node in walk.scaled_backward:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            continue
        is_scaled = isinstance(node.func.value, cst.Call) and last_name(node.func.value.func) == "scale"
        if not is_scaled:
            scaler = home.scaler(facts.file.function(node))
            edits.expressions[node] = partial(_scaled_backward, scaler=scaler)


def _scaled_backward(call: Any, scaler: str) -> cst.Call:
    """``scaler.scale(loss).backward()`` for ``loss.backward()`` or ``torch.autograd.backward(loss)``."""
    if is_autograd(call.func.value) and call.args:
        loss = cst.parse_expression(f"{scaler}.scale({code_of(call.args[0].value)})")
        return cst.ensure_type(call.with_deep_changes(call.args[0], value=loss), cst.Call)
    loss = cst.parse_expression(f"{scaler}.scale({code_of(call.func.value)})")
    return cst.ensure_type(call.with_deep_changes(call.func, value=loss), cst.Call)


def scaled_steps(walk: Walk) -> list[Step]:
    """The steps that the scaler makes."""
    return [step for step in walk.steps.values() if step.scaled]


def replace_steps(facts: Facts, walk: Walk, home: Home, edits: Edits) -> None:
    """``optimizer.step()`` becomes ``scaler.step(optimizer)``, with ``scaler.update()`` where no other step waits."""
    steps = scaled_steps(walk)
    closures = []
    for step in steps:
        call = step.call
        if call.args and not (len(call.args) == 1 and code_of(call.args[0].value) == "None"):
            closures.append(step)
            if not never_scales(facts):
                edits.mark(facts.file.statement(call), CLOSURE)
            continue
        scaler = home.scaler(facts.file.function(call))
        edits.expressions[call] = partial(_stepped, scaler=scaler)
    for group in _groups([step for step in steps if step not in closures], walk):
        _update(group, facts, walk, home, edits)


def _stepped(call: Any, scaler: str) -> cst.BaseExpression:
    return cst.parse_expression(f"{scaler}.step({code_of(call.func.value)})")


def _groups(steps: list[Step], walk: Walk) -> list[list[Step]]:
    """Steps that share an update: one that others wait for belongs to them."""
    groups: list[list[Step]] = []
    for step in steps:
        joined = [step]
        apart = []
        for group in groups:
            related = any(step.call in other.later or other.call in step.later for other in group)
            if related:
                joined = group + joined
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def _update(group: list[Step], facts: Facts, walk: Walk, home: Home, edits: Edits) -> None:
    last = max(group, key=lambda step: facts.file.order(step.call))
    index = len(last.path) - 1
    for step in group:
        if step is not last:
            index = min(index, meeting(facts.file, last.path, step.path))
    index = min(index, _loop_over(last, facts, index))
    for place in walk.unscales.values():
        if place.ids & last.ids and is_beside(place.path, last.path, facts.file):
            index = min(index, len(place.path) - 1)
    statement = last.path[index].statement
    function = facts.file.function(statement)
    edits.insert_after(statement, f"{home.scaler(function)}.update()")


def _loop_over(step: Step, facts: Facts, index: int) -> int:
    """The loop over several optimizers that a step stands in: the update follows it."""
    base = step.call.func.value if isinstance(step.call.func, cst.Attribute) else step.call
    for number, at in enumerate(step.path[: index + 1]):
        loop = at.statement
        if not isinstance(loop, cst.For):
            continue
        names = {code_of(one) for one in elements(loop.target) or [loop.target]}
        scales = any(isinstance(n, cst.Call) and facts.symbol(n.func) in SCALE_LOSS for n in descendants(loop.body))
        if code_of(base) in names and not scales:
            return number
    return index


def insert_unscale(walk: Walk, home: Home, edits: Edits) -> None:
    """``scaler.unscale_(optimizer)`` before gradients are read."""
    for place in walk.unscales.values():
        if place.statement in walk.refused:
            continue
        for name in place.names:
            edits.insert_before(place.statement, f"{home.scaler(place.function)}.unscale_({name})")


def scale_thresholds(walk: Walk, home: Home, edits: Edits) -> None:
    """``clip_grad_norm_(params, c)`` of gradients that stay scaled gets a threshold that is scaled, too.

    More gradients are added to these before the step, and ``unscale_`` may be called once before it.
    """
    for call in sorted(walk.scaled_clips, key=walk.file.order):
        scale = f"{home.scaler(walk.file.function(call))}.get_scale()"
        if not is_plain_clip(call, walk.file):
            edits.note(f"{code_of(call.func)}() is taken for a norm of gradients: its result is divided by the scale")
            edits.expressions[call] = partial(_divided, scale=scale)
            continue
        edits.expressions[call] = partial(_clipped, scale=scale)
        if last_name(call.func) != "clip_grad_norm_":
            continue
        parent = walk.file.parents[call]
        target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
        if isinstance(target, cst.Name | cst.Attribute):
            edits.insert_after(parent, f"{code_of(target)} /= {scale}")
        elif not isinstance(parent, cst.Expr):
            edits.expressions[call] = partial(_clipped_and_divided, scale=scale)


def _clipped(call: cst.Call, scale: str) -> cst.Call:
    """A call of torch's clipping with a scaled threshold."""
    threshold = clip_threshold(call)
    if threshold is None:
        return call
    scaled = cst.parse_expression(f"{in_brackets(threshold)} * {scale}")
    args = [arg.with_changes(value=scaled) if arg.value is threshold else arg for arg in call.args]
    return call.with_changes(args=args)


def _clipped_and_divided(call: cst.Call, scale: str) -> cst.CSTNode:
    return _divided(_clipped(call, scale), scale)


def _divided(norm: cst.CSTNode, scale: str) -> cst.CSTNode:
    """A norm of scaled gradients as that of unscaled ones."""
    return cst.parse_expression(f"{code_of(norm)} / {scale}")


def replace_master_params(facts: Facts, edits: Edits) -> None:
    """``amp.master_params(optimizer)``: the parameters of the optimizer are the masters."""
    for call in facts.file.of_type(cst.Call):
        if facts.symbol(call.func) not in MASTER_PARAMS:
            continue
        optimizer = argument(call, 0, "optimizer")
        if optimizer is None:
            continue
        edits.replace(call, _parameters(optimizer, call, facts))


def _parameters(optimizer: cst.BaseExpression, call: cst.Call, facts: Facts) -> str:
    """``model.parameters()`` where the optimizer was made of that and the name means it here, else its groups'."""
    function = facts.file.function(call)
    variable = facts.file.variable(optimizer)
    if variable is not None:
        for root in facts.roots(variable):
            for made, model in facts.model_of.items():
                if root in facts.roots(made) and _means(model, function, facts):
                    return f"{model}.parameters()"
    return f'(p for group in {code_of(optimizer)}.param_groups for p in group["params"])'


def _means(model: str, function: Function | None, facts: Facts) -> bool:
    """Whether a function reads a model under amp by this name."""
    for node in [*facts.file.of_type(cst.Name), *facts.file.of_type(cst.Attribute)]:
        here = facts.file.function(node) is function
        if here and code_of(node) == model and facts.is_model(node):
            return True
    return False
