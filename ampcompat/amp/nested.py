"""Optimizers that hold another and step by it: LARC, Lookahead, SAM, wrappers of training frameworks.

Amp exchanges params for masters in the lists of the groups. Where outer and inner optimizer share these lists, as they
nearly always do, both see them. Where the inner one has lists of its own, it would step half weights whose gradients
are not unscaled, so such a pair is refused at levels with masters. ``ZeroRedundancyOptimizer`` is the exception, as
said below.

Some outer optimizers are stepped in parts (SAM's ``first_step`` and ``second_step``), without the ``step`` that amp has
wrapped. Then the inner one steps, and its ``step`` does what the outer's does. apex wrapped the outer ``step`` alone.

Masters under ``torch.distributed.optim.ZeroRedundancyOptimizer``: sharded over the ranks, as its state is.

Its own groups go on holding the model's half weights, which it partitions and broadcasts. The optimizer inside, which
steps this rank's part, holds masters in their place. So a rank has masters, and float32 gradients, of what it steps and
no others; of the rest it unscales the half gradients in place, as it would without masters. Every rank sees all
gradients, so all of them find an overflow, skip the step and move the scale alike. Stepped masters are written to the
model's half weights, which are then broadcast. ``consolidate_state_dict(to)`` gives rank ``to`` those of all ranks
until the next step, so that the model is saved to the bit, and ``initialize`` at another level gives them to all. apex
had no support for it.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.masters import drop_master, ensure_master, master_of, push
from ampcompat.amp.properties import HALF_DTYPES, Properties


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


def refuse_lookahead(optimizer: Optimizer) -> None:
    """Raise a RuntimeError where a Lookahead that amp was not given calls: it goes on after the masters' step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step":  # reading f_locals of other, long-lived frames keeps their objects alive
            caller = frame.f_locals.get("self")
            if _is_lookahead_around(caller, optimizer):
                inner_name = type(optimizer).__name__
                outer_name = type(caller).__name__
                raise RuntimeError(
                    f"A {inner_name} under amp is stepped by a {outer_name} - it reads gradients and writes weights"
                    f" after the masters have stepped - give the {outer_name} to amp.initialize and amp.scale_loss"
                    f" instead of the {inner_name} (D37)."
                )
        frame = frame.f_back


def _is_lookahead_around(caller: object, optimizer: Optimizer) -> bool:
    if "lookahead" not in type(caller).__name__.lower():
        return False
    return any(inner is optimizer for inner in inner_optimizers(caller))


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
    """Hook the optimizer inside, and saving and loading; the hooks stay, and do nothing without amp."""
    if not _torch.is_zero(optimizer) or "_amp_hooked" in vars(optimizer):
        return
    optimizer._amp_hooked = True
    optimizer.optim.register_step_post_hook(lambda *_: _stepped(optimizer))
    optimizer.register_load_state_dict_post_hook(_loaded)
    consolidate: Callable[..., None] = optimizer.consolidate_state_dict

    @functools.wraps(consolidate.__func__)  # type: ignore[attr-defined] # a bound method
    def consolidate_state_dict(_: Any, to: int = 0) -> None:
        gather(optimizer, to)
        consolidate(to)

    optimizer.consolidate_state_dict = types.MethodType(consolidate_state_dict, optimizer)
    join_hook: Callable[..., Any] = optimizer.join_hook

    @functools.wraps(join_hook.__func__)  # type: ignore[attr-defined] # a bound method
    def checked_join_hook(_: Any, **kwargs: Any) -> Any:
        _refuse_join(optimizer)
        return join_hook(**kwargs)

    optimizer.join_hook = types.MethodType(checked_join_hook, optimizer)


def _refuse_join(optimizer: Any) -> None:
    """Raise a RuntimeError where a rank without inputs would step scaled gradients, or none."""
    stash = vars(optimizer).get("_amp_stash")
    if stash is None or (not _has_masters(optimizer) and all(scaler.is_one for scaler in stash.session.scalers)):
        return
    raise RuntimeError(
        f"A ZeroRedundancyOptimizer in join(), at opt_level={stash.session.properties.opt_level!r} - ranks that have no"
        " inputs left step in join, outside of any scale_loss block, with gradients that are still scaled - give all"
        " ranks equally many inputs, or use an optimizer that is not sharded, with DDP's own join()."
    )


@torch.no_grad()
def gather(optimizer: Any, to: int | None = None) -> None:
    """Give rank ``to`` (None: every one) the masters of all ranks of a ZeroRedundancyOptimizer; on every rank."""
    if not _torch.is_zero(optimizer) or not _has_masters(optimizer):
        return
    optimizer._amp_stash.look_up(optimizer)
    receives = to is None or to == optimizer.rank
    owners = _owners_of_params() if receives else {}
    for rank, params in enumerate(_torch.params_by_rank(optimizer)):
        source = dist.get_global_rank(optimizer.process_group, rank)
        steps_here = rank == optimizer.rank
        for half in params:
            if half.dtype not in HALF_DTYPES:
                continue
            master = master_of(half)
            if steps_here and master is not None:
                master.reconcile(compare=True)
                value = master.value.detach()
            else:
                value = torch.empty_like(half, dtype=torch.float32)
            _torch.broadcast_elements(value, source, optimizer.process_group)
            if receives and not steps_here:
                if master is None:
                    module, name = owners[id(half)]
                    master = ensure_master(module, name)
                master.value.copy_(value)
                master.record_versions()


def _owners_of_params() -> dict[int, tuple[torch.nn.Module, str]]:
    """The module and name of each parameter of models under amp, by its id."""
    owners: dict[int, tuple[torch.nn.Module, str]] = {}
    for model in state.models.live:
        for module in model.modules():
            for name, param in module._parameters.items():
                owners[id(param)] = (module, name)
    return owners


def _stepped(optimizer: Any) -> None:
    """Write the masters that this rank has stepped to the model, before its weights are broadcast."""
    if not _has_masters(optimizer):
        return
    push(optimizer._amp_stash.masters)
    for rank, params in enumerate(_torch.params_by_rank(optimizer)):
        if rank == optimizer.rank:
            continue
        for half in params:
            master = master_of(half)
            if master is not None:  # of a gathered or loaded weight, which another rank now steps
                drop_master(master)


def _has_masters(optimizer: Any) -> bool:
    stash = vars(optimizer).get("_amp_stash")
    return stash is not None and bool(stash.session.policy.master_weights)


def _loaded(optimizer: Any) -> None:
    """Move state that was loaded for half weights to their masters."""
    stash = vars(optimizer).get("_amp_stash")
    if stash is None:
        return
    inner_state = optimizer.optim.state
    for master in stash.masters:
        optimizer.state.pop(master.half, None)  # torch's second copy, in half
        if master.half in inner_state:
            inner_state[master.value] = inner_state.pop(master.half)
