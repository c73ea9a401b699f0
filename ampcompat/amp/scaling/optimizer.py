"""An optimizer under amp: its methods, and how they are wrapped.

They are wrapped once, as bound methods, with ``functools.wraps``: LR schedulers built before or after ``initialize``
patch and inspect ``optimizer.step``, and go on doing so without a warning. apex patched the same methods
(``apex/amp/_process_optimizer.py``) and, for one step after an overflow, ``step`` once more
(``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.casts.contexts import CastsOff, cast_state, save
from ampcompat.amp.half.masters import align_written, follow_requires_grad, master_of, push_all
from ampcompat.amp.scaling.backward_methods import post_amp_backward, prepare_amp_backward
from ampcompat.amp.scaling.block import block_state, open_block_of
from ampcompat.amp.scaling.clearing import clear_by_optimizer, clear_with_model
from ampcompat.amp.scaling.closures import step_with_closure
from ampcompat.amp.scaling.groups import (
    follow_added_group,
    follow_changes,
    follow_groups,
    give_back_params,
    match_state,
)
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index, optimizer_under_amp
from ampcompat.amp.scaling.session import Session
from ampcompat.amp.scaling.steps import make_or_skip_step, report_all


# -- step --------------------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def step(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow.

    The closure is the argument of that name, or the first one if it can be called. Anything else is passed on: a step
    of a script's own may take a loss, or more.

    Host syncs: one if a dynamic scale left a flag; on a skip, one more for each scale printed.
    None with a static scale. None with an optimizer that takes ``found_inf``, except in its first step with momentum.
    """
    stash: OptimizerState = optimizer._amp_stash
    if stash.in_replaced_step:  # a script's own step, which amp's is around already, has called this one
        return original(*args, **kwargs)
    follow_changes(optimizer)
    if block_state.open_blocks:
        _refuse_in_block(optimizer, stash)
    if args or kwargs:
        closure, original = _with_arguments(original, args, kwargs)
        if closure is not None:
            outside = save(cast_state.device_types)
            with CastsOff():
                return step_with_closure(optimizer, original, closure, outside)
    casting = cast_state.original is not None or any(map(torch.is_autocast_enabled, cast_state.device_types))
    with CastsOff() if casting else nullcontext():
        return make_or_skip_step(optimizer, stash, original)


def _with_arguments(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[..., Any]]:
    """The closure among the arguments of a step, or None; and ``original`` with the rest, which may yet take it."""
    if callable(kwargs.get("closure")):
        return kwargs["closure"], lambda closure: original(*args, **{**kwargs, "closure": closure})
    if args and callable(args[0]):
        return args[0], lambda closure: original(closure, *args[1:], **kwargs)
    return None, functools.partial(original, *args, **kwargs)


def _refuse_in_block(optimizer: AmpOptimizer, stash: OptimizerState) -> None:
    """Refuse a step inside a block that gives gradients to tensors of ``optimizer``."""
    open_block = open_block_of(stash.leaves)
    if open_block is None:
        return
    is_scaled = open_block.scale is not None
    if is_scaled:
        gradients = "gradients are still multiplied by the loss scale there"
    else:
        gradients = "master weights get their gradients at its end"
    whose = "its scale_loss block"
    if optimizer not in open_block.optimizers:
        other = type(open_block.optimizers[0]).__name__
        whose = f"the scale_loss block of another optimizer ({other}) that shares parameters with it"
    raise RuntimeError(
        f"optimizer.step() inside {whose} - {gradients} - leave the block first: `with"
        " amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step (D38)."
    )


# -- skipping ----------------------------------------------------------------------------------------------------------
def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped for an overflow. apex had no such call.

    Reads the device if only that knows: one host sync, with an optimizer that takes ``found_inf``.

    Args:
        optimizer: An optimizer, or a LARC around one; False for one that is not under amp.
    """
    stash = getattr(optimizer_under_amp(optimizer), "_amp_stash", None)
    if stash is None:
        return False
    report_all(stash)
    return bool(stash.device_skipped if stash.skipped is None else stash.skipped)


# -- a script asks for masters -----------------------------------------------------------------------------------------
def prepare_masters(optimizer: AmpOptimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients.
    """
    stash: OptimizerState = optimizer._amp_stash
    follow_changes(optimizer)
    if open_block_of(stash.leaves) is None:
        clear_with_model(stash.leaves.masters)
        align_written(stash.leaves.masters)
    follow_requires_grad(stash.leaves.masters)


# -- add_param_group ---------------------------------------------------------------------------------------------------
def add_param_group(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add the group as torch does, then give its half params masters."""
    stash: OptimizerState = optimizer._amp_stash
    open_block = open_block_of(stash.leaves)
    if open_block is not None:
        raise RuntimeError(
            "optimizer.add_param_group() inside its scale_loss block - the block would not unscale the gradients of the"
            " new parameters - add the group before the block, or after it."
        )
    original(*args, **kwargs)
    *earlier, added = optimizer.param_groups
    masters = [master for master in map(master_of, added["params"]) if master is not None and master.is_lent]
    held = {id(param) for group in earlier for param in group["params"]} if masters else set()
    if any(id(master.value) in held for master in masters):
        optimizer.param_groups.pop()
        raise ValueError(
            "some parameters appear in more than one parameter group - the optimizer holds their float32 masters"
            " already - leave them out of the new group."
        )
    follow_added_group(optimizer)


# -- under amp, and out of it ------------------------------------------------------------------------------------------
def attach(optimizer: AmpOptimizer, session: Session, kind: type[OptimizerState]) -> None:
    """Put ``optimizer`` under ``session``; one of an earlier session changes hands, with its gradients.

    The caller calls ``follow_groups`` when it has attached all.

    Args:
        optimizer: It gets a stash, and methods of amp.
        session: The session that owns it from now on.
        kind: The class of its stash, which adds apex's names.
    """
    stash: OptimizerState | None = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        stash = kind(session)
        optimizer._amp_stash = stash
    stash.session = session
    stash.groups = []  # to be looked up anew, at this level
    optimizer_index.live.pop(optimizer, None)
    optimizer_index.live[optimizer] = None  # the latest session's come last
    optimizer_index.may_hold_dropped = True
    optimizer_index.disabled.pop(optimizer, None)
    for name, action in _METHODS.items():
        setattr(optimizer, name, types.MethodType(action, optimizer))
    if not getattr(optimizer, "_amp_wrapped", False):
        optimizer._amp_wrapped = True
        for name, method in (("step", step), ("zero_grad", clear_by_optimizer), ("add_param_group", add_param_group)):
            setattr(optimizer, name, types.MethodType(_wrap(getattr(optimizer, name), method), optimizer))
    _follow_step(optimizer)


def detach(optimizer: AmpOptimizer) -> None:
    """Undo :func:`attach`, but for the wrappers of methods, which pass on."""
    follow_changes(optimizer)
    optimizer_index.live.pop(optimizer, None)
    give_back_params(optimizer)
    match_state(optimizer, optimizer.param_groups)
    for name in ("_amp_stash", *_METHODS):
        vars(optimizer).pop(name, None)
    follow_groups()


def _wrap(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_amp_stash" in self.__dict__:
            return method(self, original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


#: The code that all wrappers share: the compiler goes by it, too.
_WRAPPER_CODE = _torch.skip_compile_of_frame(_wrap(print, print)).__code__


# -- a step of the script's own ----------------------------------------------------------------------------------------
def _follow_step(optimizer: AmpOptimizer) -> None:
    """Wrap a ``step`` that a script has put in the place of ours, and that may call the class's: amp steps around it.

    As under apex, which replaced whatever ``step`` there was after an overflow.
    """
    stash: OptimizerState = optimizer._amp_stash
    if not _is_ours(vars(optimizer).get("step")):
        replaced = functools.partial(_run_replaced, stash, optimizer.step)
        wrapper = functools.wraps(optimizer.step)(_wrap(replaced, step))
        vars(optimizer)["step"] = types.MethodType(wrapper, optimizer)
    stash.known_step = vars(optimizer)["step"]


def _is_ours(method: Any) -> bool:
    """Whether ``method`` is a wrapper of ours, or one around it that says so: an LR scheduler's, from torch 2.5 on."""
    function = getattr(method, "__func__", method)
    while function is not None:
        if getattr(function, "__code__", None) is _WRAPPER_CODE:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _run_replaced(stash: OptimizerState, replaced: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the ``replaced`` step of a script; where that calls amp's, the optimizer's own runs."""
    stash.in_replaced_step = True
    try:
        return replaced(*args, **kwargs)
    finally:
        stash.in_replaced_step = False


# -- methods beside these ----------------------------------------------------------------------------------------------
#: Methods that amp adds to an optimizer: two of its own, then five with apex's private names.
_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_prepare_masters": prepare_masters,
    "_amp_follow_step": _follow_step,
    # apex made masters in these two. Here masters exist since ``initialize``.
    "_amp_lazy_init": follow_changes,
    "_lazy_init_maybe_master_weights": follow_changes,
    "_master_params_to_model_params": lambda optimizer: push_all(optimizer._amp_stash.leaves.masters),
    # Blocks never call these two, so a script's replacement of one is not called.
    "_prepare_amp_backward": prepare_amp_backward,
    "_post_amp_backward": post_amp_backward,
}
