"""Optimizers that hold another and step by it: LARC, Lookahead, SAM, wrappers of training frameworks.

Amp exchanges params for masters in the lists of the groups. Where outer and inner optimizer share these lists, as they
nearly always do, both see them. Where the inner one has lists of its own, it would step half weights whose gradients
are not unscaled, so such a pair is refused at levels with masters. So is ``ZeroRedundancyOptimizer``, which broadcasts
what it steps; ``fully_shard`` is the one that shards masters.

Some outer optimizers are stepped in parts (SAM's ``first_step`` and ``second_step``), without the ``step`` that amp has
wrapped. Then the inner one steps, and its ``step`` does what the outer's does. apex wrapped the outer ``step`` alone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp.properties import Properties


def inner_optimizers(optimizer: object) -> list[Any]:
    """Every optimizer in the attributes of ``optimizer``, and in theirs: each once."""
    holders: list[object] = [optimizer]
    for holder in holders:  # the list grows while it is read
        for value in getattr(holder, "__dict__", {}).values():
            held: Iterable[object] = (value,)
            if isinstance(value, dict):
                held = value.values()
            elif isinstance(value, (list, tuple)):
                held = value
            for inner in held:
                if isinstance(inner, torch.optim.Optimizer) and not any(inner is known for known in holders):
                    holders.append(inner)
    return holders[1:]


def holds_optimizers(optimizer: object) -> bool:
    """Whether ``optimizer`` steps by another: a ``ZeroRedundancyOptimizer``, which may make its own later, too."""
    return _torch.is_zero(optimizer) or bool(inner_optimizers(optimizer))


def check(optimizers: list[Any], options: Properties) -> None:
    """Refuse optimizers around others where masters would not reach the one inside, or cannot work at all."""
    for outer in optimizers:
        if _torch.is_zero(outer):
            _refuse_unfit_zero(outer, options)
        elif options.master_weights:
            _refuse_separate_groups(outer, optimizers, options.opt_level)


def _refuse_unfit_zero(optimizer: Any, options: Properties) -> None:
    if _torch.steps_in_backward(optimizer):
        raise RuntimeError(
            "amp.initialize got a ZeroRedundancyOptimizer with overlap_with_ddp=True - it steps inside the"
            " backward pass, before gradients are unscaled - make it with overlap_with_ddp=False."
        )
    if options.master_weights:
        raise RuntimeError(
            f"amp.initialize got a ZeroRedundancyOptimizer at opt_level={options.opt_level!r} - it broadcasts what it"
            " steps, which would be float32 masters - shard the model instead (torch.distributed.fsdp.fully_shard), or"
            " use opt_level='O1' (O4 for bfloat16; D47)."
        )
    if optimizer.parameters_as_bucket_view and options.cast_model_type in HALF_DTYPES:
        raise RuntimeError(
            "amp.initialize got a ZeroRedundancyOptimizer with parameters_as_bucket_view=True at"
            f" opt_level={options.opt_level!r} - its buckets hold the float32 weights, which the level casts - make it"
            " with parameters_as_bucket_view=False, or use opt_level='O1' (O4 for bfloat16)."
        )


def _refuse_separate_groups(outer: Any, given: list[Any], level: str) -> None:
    """Refuse ``outer`` if one inside has its params in lists of its own, and is not ``given`` to ``initialize`` too."""
    outer_lists = _param_lists(outer)
    outer_params = {id(param) for group in outer.param_groups for param in group["params"]}
    for inner in inner_optimizers(outer):
        own_lists = [group["params"] for group in inner.param_groups if id(group["params"]) not in outer_lists]
        own_params = {id(param) for params in own_lists for param in params}
        is_given = any(inner is optimizer for optimizer in given)
        if is_given or outer_params.isdisjoint(own_params):
            continue
        raise RuntimeError(
            f"amp.initialize got a {type(outer).__name__} around a {type(inner).__name__} at"
            f" opt_level={level!r} - each has param groups of its own, and masters put into the first's do not"
            f" reach the second, which steps - pass the {type(inner).__name__}, have both share the groups"
            " (self.param_groups = inner.param_groups), or use opt_level='O1' (O4 for bfloat16; D37)."
        )


def wrap_steps(outer: Optimizer, original: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``step(outer, ...)`` called for the step of an optimizer inside, where no step of ``outer`` calls it.

    Returns ``original``, the own step of ``outer``, in which inner optimizers step unchanged.
    """
    outer_lists = _param_lists(outer)
    sharing = [inner for inner in inner_optimizers(outer) if _param_lists(inner) == outer_lists]
    if not sharing:
        return original
    for inner in sharing:
        inner.step = types.MethodType(_step_as_outer(weakref.ref(outer), inner.step, step), inner)
    return _noting_step(outer, original)


def _param_lists(optimizer: Optimizer) -> set[int]:
    """The ids of the lists of params in ``optimizer``'s groups."""
    return {id(group["params"]) for group in optimizer.param_groups}


def _noting_step(outer: Optimizer, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original``, the step of ``outer`` or of one inside, to record while it runs that ``outer`` is stepping."""

    @functools.wraps(original)
    def stepping(*args: object, **kwargs: object) -> object:
        outer._amp_stepping = True
        try:
            return original(*args, **kwargs)
        finally:
            outer._amp_stepping = False

    return stepping


def _step_as_outer(
    outer_ref: weakref.ref[Optimizer], original: Callable[..., Any], step: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap ``original``, the step of an inner optimizer, to step the outer one when it is called past that."""

    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: object, **kwargs: object) -> object:
        outer = outer_ref()
        if outer is None or "_amp_stash" not in vars(outer):  # not under amp any more
            return original(*args, **kwargs)
        called_by_outer = vars(outer).get("_amp_stepping", False)
        has_own_wrapper = "_amp_stash" in vars(self)
        if called_by_outer or has_own_wrapper:
            return original(*args, **kwargs)
        return step(outer, _noting_step(outer, original), *args, **kwargs)

    return wrapper


# -- ZeroRedundancyOptimizer -------------------------------------------------------------------------------------------
def attach_zero(optimizer: Any) -> None:
    """Refuse ``join()`` where gradients are scaled; without amp, the wrapper passes on."""
    if not _torch.is_zero(optimizer) or "_amp_refuses_join" in vars(optimizer):
        return
    optimizer._amp_refuses_join = True
    join_hook: Callable[..., Any] = optimizer.join_hook

    @functools.wraps(join_hook.__func__)  # type: ignore[attr-defined] # a bound method
    def checked_join_hook(_: Any, **kwargs: Any) -> Any:
        _refuse_join(optimizer)
        return join_hook(**kwargs)

    optimizer.join_hook = types.MethodType(checked_join_hook, optimizer)


def _refuse_join(optimizer: Any) -> None:
    """Raise a RuntimeError where a rank without inputs would step scaled gradients, or none."""
    stash = vars(optimizer).get("_amp_stash")
    if stash is None or all(scaler.is_one for scaler in stash.session.scalers):
        return
    raise RuntimeError(
        f"A ZeroRedundancyOptimizer in join(), at opt_level={stash.session.properties.opt_level!r} - ranks that have no"
        " inputs left step in join, outside of any scale_loss block, with gradients that are still scaled - give all"
        " ranks equally many inputs, or use an optimizer that is not sharded, with DDP's own join()."
    )
