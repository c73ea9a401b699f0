"""Rules below a block of ``amp.scale_loss``: its gradients are unscaled, and given to masters where there are some."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import asks_for_level, contradict, is_without_amp
from ampcompat.tools.check.initializations import initializing_calls
from ampcompat.tools.check.rules.blocks import With, blocks_by_function, ended_block, is_clip, yielded
from ampcompat.tools.check.rules.models import initialized_models, may_be_initialized
from ampcompat.tools.check.rules.rule import Hit
from ampcompat.tools.check.source import Source, called

#: What makes a list of its last argument, or leaves out some of it.
LISTS = ("list", "tuple", "set", "filter", "chain")
TOO_LATE = "the optimizer steps master parameters, so that this changes nothing"


def clip_of_model_params(source: Source) -> Iterator[Hit]:
    """``clip_grad_norm_(model.parameters(), 1)`` after the block, where the optimizer steps masters."""
    for call in source.calls:
        model = _model_of(source, call.args[0]) if is_clip(source, call) else ""
        if model and not _uses_masters(source, call) and _comes_too_late(source, call, model):
            yield Hit(call, f"{TOO_LATE}; clip amp.master_params(optimizer)")


def edit_of_model_gradients(source: Source) -> Iterator[Hit]:
    """``p.grad.div_(n)`` over ``model.parameters()`` after the block, where the optimizer steps masters."""
    for loop in source.kind(ast.For):
        model = _model_of(source, loop.iter)
        names = {node.id for node in source.within(loop.target) if isinstance(node, ast.Name)}
        edit = next((node for node in source.within(loop) if _edited(node) in names), None)
        if model and edit is not None and not _uses_masters(source, loop) and _comes_too_late(source, loop, model):
            yield Hit(edit, f"{TOO_LATE}; edit amp.master_params(optimizer)")


def backward_after_block(source: Source) -> Iterator[Hit]:
    """``scaled_loss.backward()`` below the block of ``amp.scale_loss(...) as scaled_loss``, which unscales nothing."""
    for call in source.calls_named("backward"):
        scaled = dotted(call.func).rpartition(".")[0]
        block = ended_block(source, call)
        if block is not None and scaled in yielded(block) and not _is_in_block_that_yields(source, call, scaled):
            yield Hit(call, f"the block that unscales its gradients has ended; indent {scaled}.backward() into it")


def _is_in_block_that_yields(source: Source, node: ast.AST, name: str) -> bool:
    around = source.ancestors(node)
    return any(isinstance(block, ast.With | ast.AsyncWith) and name in yielded(block) for block in around)


def _model_of(source: Source, node: ast.expr | None) -> str:
    """The model whose ``parameters()`` an expression is, or lists, filters or adds to.

    ``"?"`` if the model has no name, and "" if the expression is something else.
    """
    for _ in range(10):  # a name may be given itself
        if isinstance(node, ast.Name):
            node = source.value_above(node)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            node = node.generators[0].iter
        elif isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call) and called(node) in ("parameters", "named_parameters"):
            return dotted(node.func).rpartition(".")[0] or "?"
        elif isinstance(node, ast.Call) and called(node) in LISTS and node.args:
            node = node.args[-1]
        else:
            return ""
    return ""


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


def _uses_masters(source: Source, change: ast.expr | ast.stmt) -> bool:
    """Whether the function of a change takes masters too: it has a branch for each precision.

    To clip masters does not make an edit of the model's gradients right.
    """
    for call in source.calls_to("apex.amp.master_params"):
        if source.scope(call) is not source.scope(change):
            continue
        if isinstance(change, ast.Call) or not _is_clipped(source, call):
            return True
    return False


def _is_clipped(source: Source, params: ast.Call) -> bool:
    around = source.parents[params]
    return isinstance(around, ast.Call) and is_clip(source, around)


def _comes_too_late(source: Source, change: ast.expr | ast.stmt, model: str) -> bool:
    """Whether a change of a model's gradients runs after a block has given these to masters."""
    if source.bindings.is_native or asks_for_level(source, change) or not may_be_initialized(source, model):
        return False
    return ended_block(source, change) is not None or _follows_a_block_of_its_class(source, change, model)


def _follows_a_block_of_its_class(source: Source, change: ast.expr | ast.stmt, model: str) -> bool:
    """Whether a method changes gradients that another method of its class has given to masters.

    ``initialize`` is called by the class, or by another file. A method with a backward pass of its own may have an
    optimizer of its own, and a class that clips masters somewhere knows of them.
    """
    around = source.class_around(change)
    method = source.scope(change)
    if around is None or not model.startswith("self.") or _clips_masters(source, around):
        return False
    if any(source.scope(call) is method for call in source.calls_named("backward")):
        return False
    calls = initializing_calls(source)
    if not calls:
        blocks = _blocks_of_class(source, around)
        return any(not contradict(source, block, change) for block in blocks) and not is_without_amp(source, change)
    if model.removesuffix(".module") not in initialized_models(source):
        return False
    return any(source.class_around(call) is around and not contradict(source, call, change) for call in calls)


def _blocks_of_class(source: Source, around: ast.ClassDef) -> list[With]:
    by_function = blocks_by_function(source).values()
    return [block for blocks in by_function for block in blocks if source.class_around(block) is around]


def _clips_masters(source: Source, around: ast.ClassDef) -> bool:
    calls = source.calls_to("apex.amp.master_params")
    return any(source.class_around(call) is around and _is_clipped(source, call) for call in calls)
