"""``step``, ``zero_grad`` and ``add_param_group`` of an optimizer under amp, wrapped once, as bound methods.

Bound methods, with ``functools.wraps``: LR schedulers built before or after ``initialize`` patch and inspect
``optimizer.step``, and go on doing so without a warning. apex patched the same methods
(``apex/amp/_process_optimizer.py``) and, for one step after an overflow, ``step`` once more
(``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.casts.contexts import CastsOff, save
from ampcompat.amp.half.masters import Master, drop_cleared_gradients, master_of, push_all, zero_gradients
from ampcompat.amp.scaling import block, legacy_methods, passes
from ampcompat.amp.scaling.closures import step_with_closure
from ampcompat.amp.scaling.exchange import give_back_params, match_state
from ampcompat.amp.scaling.gradient_sets import regroup, sets_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.session import Session
from ampcompat.amp.scaling.steps import needs_no_amp, plain_step, scaled_step


def attach(optimizer: Optimizer, session: Session) -> None:
    """Put ``optimizer`` under ``session``; one that an earlier call owned changes hands, with its gradients.

    The caller calls ``regroup`` when it has attached all.
    """
    earlier: AmpOptimizerState | None = getattr(optimizer, "_amp_stash", None)
    stash = AmpOptimizerState(session) if earlier is None else earlier
    stash.session = session
    optimizer._amp_stash = stash
    state.optimizers.live[optimizer] = None
    state.optimizers.disabled.pop(optimizer, None)
    stash.adopt(optimizer)
    match_state(optimizer)
    for name, action in _METHODS.items():
        setattr(optimizer, name, types.MethodType(action, optimizer))
    if not getattr(optimizer, "_amp_wrapped", False):
        optimizer._amp_wrapped = True
        for name, method in (("step", step), ("zero_grad", _zero_grad), ("add_param_group", _add_param_group)):
            setattr(optimizer, name, types.MethodType(_wrap(getattr(optimizer, name), method), optimizer))


def detach(optimizer: Optimizer) -> None:
    """Undo :func:`attach`, but for the wrappers of methods, which pass on.

    Where gradients are still scaled (pending), and no other optimizer holds them, they are cleared.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    others = [other for other in state.optimizers.listed() if other is not optimizer]
    theirs = sets_of(others)
    for gradient_set in stash.sets:
        if gradient_set.pending is not None and gradient_set not in theirs:
            for leaf in gradient_set.leaves():
                leaf.grad = None
            gradient_set.note_cleared()
    give_back_params(optimizer)
    match_state(optimizer)
    for name in ("_amp_stash", *_METHODS):
        vars(optimizer).pop(name, None)
    state.optimizers.live.pop(optimizer, None)
    regroup()


def _wrap(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_amp_stash" in self.__dict__:
            return method(self, original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


_torch.skip_compile_of_frame(_wrap(print, print))  # any wrapper does: the compiler goes by code, which all share


# -- step --------------------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def step(optimizer: Optimizer, original: Callable[..., Any], closure: Any = None, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow.

    What a step of a script's own takes beside the closure is given to it by name.

    Host syncs: one where the flag of a dynamic scale waits, or gradients of an earlier overflow may still be there; one
    more for each scale that the message of a skip names. None with a static scale, nor with an optimizer that takes
    ``found_inf``, but for its first step with momentum.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    for gradient_set in stash.sets:
        if gradient_set.block is not None and not gradient_set.block.is_plain:
            _refuse_in_block(optimizer, gradient_set.block)
    if closure is not None and not callable(closure):
        raise TypeError(
            f"optimizer.step got {type(closure).__name__} as closure - it must be callable - pass a function that"
            " returns the loss, or nothing."
        )
    casts = state.casts
    if closure is not None:
        outside = save(casts.device_types)
        with CastsOff():
            return step_with_closure(optimizer, original, closure, outside, **kwargs)
    casting = casts.original is not None or any(map(torch.is_autocast_enabled, casts.device_types))
    with CastsOff() if casting else nullcontext():
        if needs_no_amp(stash):
            return plain_step(optimizer, stash, original, **kwargs)
        return scaled_step(optimizer, stash, functools.partial(original, **kwargs))


def _refuse_in_block(optimizer: Optimizer, open_block: Any) -> NoReturn:
    """Refuse a step inside ``open_block``, which gives gradients to tensors of ``optimizer``."""
    if optimizer in open_block.optimizers:
        raise RuntimeError(
            "optimizer.step() inside its scale_loss block - gradients are still multiplied by the loss scale there -"
            " leave the block first: `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step."
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
    stash = getattr(block.under_amp(optimizer), "_amp_stash", None)
    if stash is None:
        return False
    stash.report_all()
    return bool(stash.last_step.skipped)


# -- zero_grad, add_param_group ----------------------------------------------------------------------------------------
@_torch.eager
def _zero_grad(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear master gradients as asked, and the half gradients of the model with them."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    if stash.masters:
        drop_cleared_gradients(stash.masters)  # before what is None becomes zeros
    original(*args, **kwargs)
    if stash.masters:
        _clear_half_gradients(stash.masters, *args, **kwargs)
    for gradient_set in stash.sets:
        gradient_set.note_cleared()


@_torch.without_grad
def _clear_half_gradients(masters: list[Master], *args: Any, **kwargs: Any) -> None:
    """Clear the model's gradients as ``zero_grad`` has cleared those of masters: to None, or to zero."""
    asked_for_zeros = (args and args[0] is False) or kwargs.get("set_to_none") is False
    zeroed = []
    for master in masters:
        grad = master.half.grad
        if grad is not None and (asked_for_zeros or master.value.grad is not None):
            grad.detach_().zero_()
            zeroed.append(master)
        else:
            master.half.grad = None
            master.added_grad = None
    if zeroed:
        zero_gradients(zeroed)


def _add_param_group(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add the group as torch does, then give its half params masters."""
    stash: AmpOptimizerState = optimizer._amp_stash
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
    stash.look_up(optimizer)


# -- methods beside these ----------------------------------------------------------------------------------------------
#: By apex's private names, but for the first. Masters exist since ``initialize``. Blocks call the last two, once a
#: script has put its own in their place.
_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_show_masters": passes.show_masters,
    "_amp_lazy_init": lambda optimizer: optimizer._amp_stash.look_up(optimizer),
    "_lazy_init_maybe_master_weights": lambda optimizer: optimizer._amp_stash.look_up(optimizer),
    "_master_params_to_model_params": lambda optimizer: push_all(optimizer._amp_stash.masters),
    "_prepare_amp_backward": legacy_methods.prepare_amp_backward,
    "_post_amp_backward": legacy_methods.post_amp_backward,
}
