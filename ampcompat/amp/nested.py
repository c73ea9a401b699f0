"""Optimizers that hold another and step by it: LARC, Lookahead, SAM, wrappers of training frameworks.

Amp exchanges params for masters in the lists of the groups. Where outer and inner optimizer share these lists, as they
nearly always do, both see them. Where the inner one has lists of its own, it would step half weights whose gradients
are still scaled, so such a pair is refused at levels with masters. ``ZeroRedundancyOptimizer``, which partitions and
broadcasts the weights, is refused at levels that cast them.

Some outer optimizers are stepped piece by piece (SAM's ``first_step`` and ``second_step``), past the ``step`` that amp
has wrapped: what steps then is the inner one, whose ``step`` is the outer's. apex wrapped the outer ``step`` alone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ampcompat import _torch
from ampcompat.amp.properties import HALF_DTYPES, Optimizer, Properties, inner_optimizers


def check(optimizers: Iterable[Optimizer], options: Properties) -> None:
    """Refuse optimizers around others where masters would not reach the one inside, or cannot work at all.

    Raises:
        RuntimeError: There is such an optimizer.
    """
    given = list(optimizers)
    for outer in given:
        if _torch.is_zero(outer):
            _check_zero(outer, options)
        elif options.master_weights:
            for inner in inner_optimizers(outer):
                if not any(inner is one for one in given):
                    _check_groups(outer, inner, options)


def _check_groups(outer: Optimizer, inner: Optimizer, options: Properties) -> None:
    shared, params = _lists(outer), {id(param) for group in outer.param_groups for param in group["params"]}
    apart = [group["params"] for group in inner.param_groups if id(group["params"]) not in shared]
    if any(id(param) in params for some in apart for param in some):
        raise RuntimeError(
            f"amp.initialize got a {type(outer).__name__} around a {type(inner).__name__} at"
            f" opt_level={options.opt_level!r} - each has param groups of its own, and masters put into the first's"
            f" do not reach the second, which steps - pass the {type(inner).__name__}, have both share the groups"
            " (self.param_groups = inner.param_groups), or use opt_level='O1' (O4 for bfloat16; D37)."
        )


def _check_zero(optimizer: Any, options: Properties) -> None:
    if _torch.steps_in_backward(optimizer):
        raise RuntimeError(
            "amp.initialize got a ZeroRedundancyOptimizer with overlap_with_ddp=True - it steps inside the backward"
            " pass, before gradients are unscaled - make it with overlap_with_ddp=False."
        )
    if options.cast_model_type in HALF_DTYPES:
        raise RuntimeError(
            f"amp.initialize got a ZeroRedundancyOptimizer at opt_level={options.opt_level!r} - it partitions and"
            " broadcasts the model's own weights, which the level casts to half - use opt_level='O1' (O4 for bfloat16)."
        )


def refuse_lookahead(optimizer: Optimizer) -> None:
    """Raise a RuntimeError where a Lookahead that amp was not given calls: it goes on after the masters' step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Of short-lived frames only: f_locals keeps what is in there alive.
        outer, frame = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None, frame.f_back
        if "lookahead" in type(outer).__name__.lower() and any(one is optimizer for one in inner_optimizers(outer)):
            inner, outer = type(optimizer).__name__, type(outer).__name__
            raise RuntimeError(
                f"A {inner} under amp is stepped by a {outer} - it reads gradients and writes weights after the"
                f" masters have stepped - give the {outer} to amp.initialize and amp.scale_loss instead of the {inner}"
                " (D37)."
            )


def wrap_steps(outer: Optimizer, original: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the ``step`` of an optimizer inside, where no step of ``outer`` calls it, be one of ``outer``'s.

    Args:
        outer: An optimizer under amp.
        original: Its own ``step``.
        step: Called with ``outer``, the inner optimizer's own ``step``, and its arguments.

    Returns:
        ``original``, in which inner optimizers step as ever.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: object, **kwargs: object) -> object:
            outer._amp_stepping = True
            try:
                return function(*args, **kwargs)
            finally:
                outer._amp_stepping = False

        return marked

    def as_outers(function: Callable[..., Any]) -> Callable[..., Any]:
        marked = mark(function)

        @functools.wraps(getattr(function, "__func__", function))
        def wrapper(self: Any, *args: object, **kwargs: object) -> object:
            held = vars(outer)
            if "_amp_stash" not in held or held.get("_amp_stepping") or "_amp_stash" in vars(self):
                return function(*args, **kwargs)
            return step(outer, marked, *args, **kwargs)

        return wrapper

    inner = [one for one in inner_optimizers(outer) if _lists(one) == _lists(outer)]
    for one in inner:
        one.step = types.MethodType(as_outers(one.step), one)
    return mark(original) if inner else original


def _lists(optimizer: Optimizer) -> set[int]:
    return {id(group["params"]) for group in optimizer.param_groups}
