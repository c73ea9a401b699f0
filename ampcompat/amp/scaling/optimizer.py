"""``step`` and ``add_param_group`` of an optimizer under amp, and what scripts ask it for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.casts.contexts import CastsOff, cast_state, save
from ampcompat.amp.half.masters import align_written, master_of
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling.closures import step_with_closure
from ampcompat.amp.scaling.groups import look_up
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import block_state, is_in_block, open_block_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState
from ampcompat.amp.scaling.scale_loss import under_amp
from ampcompat.amp.scaling.steps import make_or_skip_step, report_all
from ampcompat.amp.scaling.unreduced import averages_by_script
from ampcompat.amp.scaling.unscaling import drop_cleared


# -- step --------------------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def step(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow.

    The closure is the argument of that name, or the first one if it can be called. Anything else is passed on: a step
    of a script's own may take a loss, or more.

    Host syncs: one where the flag of a dynamic scale waits, or gradients of an earlier overflow may still be there; one
    more for each scale that the message of a skip names. None with a static scale, nor with an optimizer that takes
    ``found_inf``, but for its first step with momentum.
    """
    stash: OptimizerState = optimizer._amp_stash
    if stash.is_stepping:  # a script's own step, which amp's is around already, has called this one
        return original(*args, **kwargs)
    look_up(optimizer)
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
    if open_block is None or open_block.is_plain:
        return
    if optimizer in open_block.optimizers:
        is_scaled = open_block.scale is not None
        if is_scaled:
            gradients = "gradients are still multiplied by the loss scale there"
        else:
            gradients = "master weights get their gradients at its end"
        raise RuntimeError(
            f"optimizer.step() inside its scale_loss block - {gradients} - leave the block first: `with"
            " amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step."
        )
    other = type(open_block.optimizers[0]).__name__
    raise RuntimeError(
        f"optimizer.step() inside the scale_loss block of another optimizer ({other}) that shares parameters with this"
        " one - their gradients are still multiplied by the loss scale there, or saved - leave the block first, then"
        " step (D38)."
    )


# -- skipping ----------------------------------------------------------------------------------------------------------
def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped for an overflow. apex had no such call.

    Reads the device if only that knows: one host sync, with an optimizer that takes ``found_inf``.

    Args:
        optimizer: An optimizer, or a LARC around one; False for one that is not under amp.
    """
    stash = getattr(under_amp(optimizer), "_amp_stash", None)
    if stash is None:
        return False
    report_all(stash)
    return bool(stash.device_skipped if stash.skipped is None else stash.skipped)


# -- a script asks for masters -----------------------------------------------------------------------------------------
def prepare_masters(optimizer: AmpOptimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients. Outside of blocks, a delayed transition is made: a
    script may end an accumulation early, clip, and step.
    """
    if observer_state.observers:
        notify("on_master_params", optimizer)
    stash: OptimizerState = optimizer._amp_stash
    look_up(optimizer)
    drop_cleared(stash.leaves.masters)
    if is_in_block(optimizer):
        return
    if not block_state.open_blocks:
        if stash.unreduced is not None and not averages_by_script(stash.leaves):
            warn_of("unreduced gradients read")
        stash.make_delayed_transitions()
    align_written(stash.leaves.masters)


# -- add_param_group ---------------------------------------------------------------------------------------------------
def add_param_group(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add the group as torch does, then give its half params masters."""
    stash: OptimizerState = optimizer._amp_stash
    open_block = open_block_of(stash.leaves)
    if open_block is not None and not open_block.is_plain:
        raise RuntimeError(
            "optimizer.add_param_group() inside its scale_loss block - the block would not unscale the gradients of the"
            " new parameters - add the group before the block, or after it."
        )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    original(*args, **kwargs)
    added = optimizer.param_groups[-1]["params"]
    masters = [master for master in map(master_of, added) if master is not None]
    if any(id(master.value) in held for master in masters):
        optimizer.param_groups.pop()
        raise ValueError(
            "some parameters appear in more than one parameter group - the optimizer holds their float32 masters"
            " already - leave them out of the new group."
        )
    look_up(optimizer)
