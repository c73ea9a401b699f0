"""Optimizers that hold another and step by it: LARC, Lookahead, SAM, wrappers of training frameworks.

Amp exchanges params for masters in the lists of the groups. Where outer and inner optimizer share these lists, as they
nearly always do, both see them. Where the inner one has lists of its own, it would step half weights that nobody
unscales gradients for, so such a pair is refused at levels with masters. ``ZeroRedundancyOptimizer`` is the exception:
see ``zero``.

Some outer optimizers are stepped piece by piece (SAM's ``first_step`` and ``second_step``), past the ``step`` that amp
has wrapped: what steps then is the inner one, whose ``step`` is the outer's. apex wrapped the outer ``step`` alone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.properties import Properties


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Every optimizer in the attributes of ``optimizer``, and in theirs: each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    to_do = [optimizer]
    while to_do:
        for held in getattr(to_do.pop(), "__dict__", {}).values():
            several = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
            for one in several:
                if isinstance(one, torch.optim.Optimizer) and one is not optimizer and id(one) not in found:
                    found[id(one)] = one
                    to_do.append(one)
    return list(found.values())


def check(optimizers: Iterable[Any], options: Properties) -> None:
    """Refuse, where there will be masters, an optimizer around another that steps the same params by other groups.

    Raises:
        RuntimeError: There is such a pair.
    """
    given = list(optimizers)
    for outer in given if options.master_weights else ():
        lists = _lists(outer)
        params = {id(param) for group in outer.param_groups for param in group["params"]}
        for inner in () if _torch.is_zero(outer) else inner_optimizers(outer):
            apart = [group["params"] for group in inner.param_groups if id(group["params"]) not in lists]
            if any(inner is one for one in given) or params.isdisjoint(id(param) for some in apart for param in some):
                continue
            raise RuntimeError(
                f"amp.initialize got a {type(outer).__name__} around a {type(inner).__name__} at"
                f" opt_level={options.opt_level!r} - each has param groups of its own, and masters put into the first's"
                f" do not reach the second, which steps - pass the {type(inner).__name__}, have both share the groups"
                " (self.param_groups = inner.param_groups), or use opt_level='O1' (O4 for bfloat16)."
            )


def wrap_steps(outer: Any, original: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the ``step`` of an optimizer inside, where no step of ``outer`` calls it, be one of ``outer``'s.

    Args:
        outer: An optimizer under amp.
        original: Its own ``step``.
        step: Called with ``outer``, the inner optimizer's own ``step``, and its arguments.

    Returns:
        ``original``, in which inner optimizers step as ever.
    """
    lists = _lists(outer)
    inner = [one for one in inner_optimizers(outer) if _lists(one) == lists]
    for one in inner:
        one.step = _as_outers(outer, one, step)  # type: ignore[method-assign]
    return _marking(outer, original) if inner else original


def _lists(optimizer: Any) -> set[int]:
    return {id(group["params"]) for group in optimizer.param_groups}


def _as_outers(outer: Any, inner: Any, step: Callable[..., Any]) -> Any:
    reference, original = weakref.ref(outer), inner.step
    marking = _marking(outer, original)

    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = reference()
        stash = None if found is None else vars(found).get("_amp_stash")
        if stash is None or vars(found).get("_amp_stepping") or "_amp_stash" in vars(self):
            return original(*args, **kwargs)
        return step(found, marking, *args, **kwargs)

    return types.MethodType(wrapper, inner)


def _marking(outer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which notes meanwhile that ``outer`` is stepping."""
    reference = weakref.ref(outer)

    @functools.wraps(original)
    def marking(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        stash = None if found is None else vars(found).get("_amp_stash")
        if found is None or stash is None:
            return original(*args, **kwargs)
        found._amp_stepping = True
        try:
            return original(*args, **kwargs)
        finally:
            found._amp_stepping = False

    return marking
