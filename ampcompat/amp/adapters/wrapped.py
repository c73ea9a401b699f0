"""Optimizers that hold another and step by it: LARC, Lookahead, SAM, wrappers of training frameworks.

Amp exchanges params for masters in the lists of the groups. Where outer and inner optimizer share these lists, as they
nearly always do, both see them. Where the inner one has lists of its own, it would step half weights whose gradients
are not unscaled, so such a pair is refused at levels with masters. ``ZeroRedundancyOptimizer``, which broadcasts what
it steps, is refused at all levels that cast weights; ``fully_shard`` is the one that shards masters.

Some outer optimizers are stepped in parts (SAM's ``first_step`` and ``second_step``), without the ``step`` that amp has
wrapped. Then the inner one steps, and its ``step`` does what the outer's does. apex wrapped the outer ``step`` alone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.properties import Properties
from ampcompat.amp.scaling.groups import inner_optimizers
from ampcompat.amp.scaling.optimizer import step
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer


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
    if options.cast_model_type in HALF_DTYPES:
        raise RuntimeError(
            f"amp.initialize got a ZeroRedundancyOptimizer at opt_level={options.opt_level!r} - it broadcasts what it"
            " steps: the weights themselves, and no float32 masters - shard the model instead"
            " (torch.distributed.fsdp.fully_shard), or use opt_level='O1' (O4 for bfloat16; D47)."
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


def wrap(optimizer: Any) -> None:
    """Wrap what amp must see of an optimizer that holds another, before amp wraps the optimizer's own methods."""
    if getattr(optimizer, "_amp_wrapped", False):
        return
    outer_lists = _param_lists(optimizer)
    sharing = [inner for inner in inner_optimizers(optimizer) if _param_lists(inner) == outer_lists]
    for inner in sharing:
        inner.step = types.MethodType(_step_as_outer(weakref.ref(optimizer), inner.step), inner)
    if sharing:
        optimizer.step = types.MethodType(_noting_step(optimizer.step), optimizer)


def _param_lists(optimizer: AmpOptimizer) -> set[int]:
    """The ids of the lists of params in ``optimizer``'s groups."""
    return {id(group["params"]) for group in optimizer.param_groups}


def _noting_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original``, the step of an outer optimizer or of one inside, to record that the outer one is stepping."""

    @functools.wraps(getattr(original, "__func__", original))
    def stepping(outer: Any, *args: object, **kwargs: object) -> object:
        outer._amp_stepping = True
        try:
            return original(*args, **kwargs)
        finally:
            outer._amp_stepping = False

    return stepping


def _step_as_outer(outer_ref: weakref.ref[AmpOptimizer], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original``, the step of an inner optimizer, to step the outer one when a script calls it directly."""

    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: object, **kwargs: object) -> object:
        outer = outer_ref()
        if outer is None or "_amp_stash" not in vars(outer):  # not under amp any more
            return original(*args, **kwargs)
        called_by_outer = vars(outer).get("_amp_stepping", False)
        has_own_wrapper = "_amp_stash" in vars(self)
        if called_by_outer or has_own_wrapper:
            return original(*args, **kwargs)
        return step(outer, functools.partial(_noting_step(original), outer), *args, **kwargs)

    return wrapper
