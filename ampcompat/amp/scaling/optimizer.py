"""``step``, ``zero_grad`` and ``add_param_group`` of an optimizer under amp, wrapped once, as bound methods.

Bound methods, with ``functools.wraps``: LR schedulers built before or after ``initialize`` patch and inspect
``optimizer.step``, and go on doing so without a warning. apex patched the same methods
(``apex/amp/_process_optimizer.py``) and, for one step after an overflow, ``step`` once more
(``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.adapters import fsdp, wrapped
from ampcompat.amp.adapters.wrapped import inner_optimizers
from ampcompat.amp.casts import CastsOff, Saved, restored, save
from ampcompat.amp.half.masters import (
    Master,
    drop_cleared_gradients,
    master_of,
    push,
    settle,
    zero_gradients,
)
from ampcompat.amp.half.record import warn_of_replaced
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import block, misuse
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session
from ampcompat.amp.scaling.sharing import never_held, refuse_pending, refuse_step_in_block, sharers, waited_for
from ampcompat.amp.scaling.stash import (
    AmpOptimizerState,
    Gradients,
    announce,
    give_back_params,
    match_state,
)

R = TypeVar("R")
#: A flag lent to an optimizer that skips on the device; no scaler: of gradients that an earlier overflow has left.
LentFlag = tuple[LossScaler | None, torch.Tensor]


def attach(optimizer: Optimizer, session: Session) -> None:
    """Put ``optimizer`` under ``session``; one that an earlier call owned changes hands, with its gradients."""
    earlier: AmpOptimizerState | None = getattr(optimizer, "_amp_stash", None)
    # A copy, so that the earlier one can be put back if ``initialize`` fails.
    stash = AmpOptimizerState(session) if earlier is None else copy.copy(earlier)
    stash.session = session
    stash.groups = []  # so that the next line adopts masters
    stash.look_up(optimizer)
    match_state(optimizer)
    if "optim" in vars(optimizer):
        wrapped.attach_zero(optimizer)
    optimizer._amp_stash = stash
    state.optimizers.live[optimizer] = None
    state.optimizers.disabled.pop(optimizer, None)
    state.optimizers.sharing = None
    for name, action in _LEGACY_METHODS.items():
        setattr(optimizer, name, types.MethodType(action, optimizer))
    if not getattr(optimizer, "_amp_wrapped", False):
        optimizer._amp_wrapped = True
        for name, method in (("step", _step), ("zero_grad", _zero_grad), ("add_param_group", _add_param_group)):
            original = getattr(optimizer, name)
            if name == "step" and inner_optimizers(optimizer):
                original = wrapped.wrap_steps(optimizer, original, _step)
            setattr(optimizer, name, types.MethodType(_wrap(original, method), optimizer))


def detach(optimizer: Optimizer) -> None:
    """Undo :func:`attach`, but for the wrappers of methods, which pass on.

    Where gradients are still scaled (pending), the ``p.grad`` of all parameters are cleared.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    if stash.pending is not None:
        for param in stash.leaves():
            param.grad = None
        block.reset_pass(optimizer, stash)
    give_back_params(optimizer)
    match_state(optimizer)
    for name in ("_amp_stash", *_LEGACY_METHODS):
        vars(optimizer).pop(name, None)
    state.optimizers.live.pop(optimizer, None)
    state.optimizers.sharing = None


def remember(optimizer: Optimizer, undo: ExitStack) -> None:
    """Have ``undo`` put ``optimizer`` back as it is now."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        for group in each.param_groups:
            undo.callback(group["params"].__setitem__, slice(None), list(group["params"]))
        undo.callback(each.state.update, dict(each.state))
        undo.callback(each.state.clear)
    undo.callback(vars(optimizer).update, dict(vars(optimizer)))
    undo.callback(vars(optimizer).clear)
    for members in (state.optimizers.live, state.optimizers.disabled):
        undo.callback(members.setdefault if optimizer in members else members.pop, optimizer, None)


def _wrap(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_amp_stash" in self.__dict__:
            return method(self, original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


_torch.skip_compile_of_frame(_wrap(print, print))  # all wrappers share its code


# -- step --------------------------------------------------------------------------------------------------------------
@_torch.skip_compile_of_frame
def _step(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow.

    Host syncs: one, none with an optimizer that takes ``found_inf`` or where nothing is scaled.
    """
    closure = kwargs.pop("closure", None)
    if args:
        original, closure = _bind_arguments(original, args, closure)
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.block is not None and stash.in_block:
        raise RuntimeError(
            "optimizer.step() inside its scale_loss block - gradients are still multiplied by the loss scale there -"
            " leave the block first: `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step."
        )
    if len(state.optimizers.live) > 1:
        refuse_step_in_block(optimizer)
    if closure is not None and not callable(closure):
        raise TypeError(
            f"optimizer.step got {type(closure).__name__} as closure - it must be callable - pass a function that"
            " returns the loss, or nothing."
        )
    casts = state.casts
    if closure is not None:
        outside = save(casts.device_types)
        with CastsOff():
            return _step_with_closure(optimizer, original, closure, outside, **kwargs)
    casting = casts.original is not None or any(map(torch.is_autocast_enabled, casts.device_types))
    with CastsOff() if casting else nullcontext():
        if _is_plain(stash):
            return _plain_step(optimizer, stash, original, **kwargs)
        return _scaled_step(optimizer, stash, functools.partial(original, **kwargs))


@_torch.eager
def _is_plain(stash: AmpOptimizerState) -> bool:
    """Whether blocks have left nothing but unscaled gradients: the scale is one, and there are no masters."""
    if stash.masters or stash.gradients is not Gradients.UNSCALED:
        return False
    noted = stash.overflows or stash.earlier_overflows or stash.undecided_steps or stash.mixed_gradient
    return not noted and not len(state.optimizers.pending)


@_torch.skip_compile_of_frame
def _plain_step(optimizer: Optimizer, stash: AmpOptimizerState, original: Callable[..., R], **kwargs: Any) -> R:
    """Step as plain torch does."""
    result = original(**kwargs)
    stash.gradients = Gradients.NONE
    stash.last_step.skipped = False
    stash.session.steps += 1
    if state.observers:
        notify("on_step", optimizer, False)
    return result


@_torch.skip_compile_of_frame
def _scaled_step(optimizer: Optimizer, stash: AmpOptimizerState, step: Callable[[], Any]) -> Any:
    """Make the step, or skip it on the host; or leave that to an optimizer that skips on the device."""
    on_device = _skips_on_device(optimizer)
    skip = _prepare(optimizer, stash, on_device)
    if stash.last_step.left_to_others:
        step = functools.partial(_without_used_gradients, stash, step)
    if skip:
        _end(optimizer, stash, skipped=True)
        return None
    flags = _flags_to_lend(stash) if on_device else []
    if not flags:
        result = step()
        _end(optimizer, stash, skipped=False)
        return result
    result = _with_flags(optimizer, stash, flags, step)
    _end(optimizer, stash, skipped=None)
    return result


def _flags_to_lend(stash: AmpOptimizerState) -> list[LentFlag]:
    """The flags any of which skips a step on the device."""
    flags: list[LentFlag] = [*stash.overflows]
    if not stash.earlier_overflows:
        return flags
    gradients = stash.gradients_for_step()
    if gradients:
        overflowed = _torch.any_of([flag for _, flag in stash.earlier_overflows])
        still_there = fsdp.any_non_finite(gradients).to(overflowed.device, non_blocking=True)
        flags.append((None, overflowed * still_there))
    return flags


def _with_flags(
    optimizer: Optimizer,
    stash: AmpOptimizerState,
    flags: list[LentFlag],
    step: Callable[[], R],
) -> R:
    """Step with ``flags`` lent to the optimizer; the message follows when they have reached the host."""
    optimizer.grad_scale = None
    optimizer.found_inf = _torch.any_of([flag for _, flag in flags])
    try:
        result = step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    on_their_way = []
    for scaler, flag in flags:
        scale = flag if scaler is None else scaler.scale_after_back_off()
        on_their_way.append((scaler, _torch.HostCopy([flag, scale])))
    stash.undecided_steps = [*stash.undecided_steps, on_their_way]
    return result


def _without_used_gradients(stash: AmpOptimizerState, step: Callable[[], R]) -> R:
    """Step without the gradients that the last step has used, and left to another optimizer."""
    hidden = stash.used_gradients()
    for master in hidden:
        master.value.grad = None
    try:
        return step()
    finally:
        for master, grad in hidden.items():
            master.value.grad = grad


def _bind_arguments(step: Callable[..., Any], args: tuple[Any, ...], closure: Any) -> tuple[Callable[..., Any], Any]:
    """``step`` with the positional arguments bound that its class gave it beside the closure, and the closure."""
    first, *rest = args
    if first is not None and not callable(first) and "closure" not in inspect.signature(step).parameters:
        return functools.partial(step, *args), closure  # ``step(lr)``
    if not rest:
        return step, first

    def bound(given_closure: Any = None, **kwargs: Any) -> Any:
        return step(given_closure, *rest, **kwargs)

    return bound, first


@_torch.eager
def _skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` looks at its ``found_inf``, and skips on the device (torch's ``fused=True``)."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        return False
    if name not in vars(optimizer) and not hasattr(type(optimizer), name):
        return False  # a wrapper that passes on what the one inside says
    # Skip on the host a step that would make momentum: torch's fused SGD leaves it uninitialised if told to skip.
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                return False
    return True


@_torch.eager
def _prepare(optimizer: Optimizer, stash: AmpOptimizerState, on_device: bool = False, is_skipped: bool = True) -> bool:
    """Have unscaled gradients and masters ready for a step; whether the host skips it.

    Args:
        optimizer: About to step.
        stash: Its own.
        on_device: The optimizer reads the overflow flags itself; the host reads none.
        is_skipped: After an overflow, the step is skipped, and a message says so.
    """
    stash.look_up(optimizer)
    if len(state.optimizers.pending):
        refuse_pending([optimizer])
        if stash.pending is not None:
            block.unscale_pending(optimizer)
    if stash.masters:
        _prepare_masters(optimizer, stash)
    if stash.undecided_steps:
        stash.report_arrived()
    if stash.gradients is Gradients.LOST:
        return True
    if stash.mixed_gradient is not None and stash.mixed_gradient.is_there():
        misuse.warn_of("scaled gradients of another block")
    if stash.gradients is not Gradients.UNSCALED:
        _warn_of_missing_gradients(stash)
    if on_device or not (stash.overflows or stash.earlier_overflows):
        return False
    if stash.undecided_steps:
        stash.report_all()
    return _has_overflowed(stash, is_skipped)


def _prepare_masters(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Have masters, and their gradients, follow what the script has done to the model's."""
    some_were_edited = drop_cleared_gradients(stash.masters)
    if some_were_edited:
        misuse.warn_of("half gradients edited")
    warn_of_replaced(stash.masters)
    settle(stash.masters)


def _warn_of_missing_gradients(stash: AmpOptimizerState) -> None:
    """Warn of a step to which no block has given gradients."""
    if not stash.masters and all(scaler.is_one for scaler in stash.session.scalers):
        return
    if stash.gradients is Gradients.EMPTY:
        misuse.warn_of("block without gradients")
        return
    gradient = stash.first_gradient()
    if gradient is None:
        return
    used = stash.last_step.first_gradient
    if used is None or _torch.tensor_of(used) is not gradient:
        misuse.warn_of("no block")


def _has_overflowed(stash: AmpOptimizerState, is_skipped: bool) -> bool:
    """Read whether gradients overflowed, and say so where a step ``is_skipped`` for it.

    Host syncs: one, of the only flag or of several together. Where a loss overflowed, one more for each scale that the
    message names, and one for its flag if that was the only one. Where an earlier overflow is still noted and no loss
    overflowed since, one more to see whether its gradients are still there.
    """
    overflows = stash.overflows
    if stash.earlier_overflows:
        overflows = [*overflows, *stash.earlier_overflows]
    _, first_flag = overflows[0]
    if len(overflows) == 1 and not first_flag.item():
        return False
    flags = [flag.to(first_flag.device) for _, flag in overflows]
    is_set = torch.stack(flags).to("cpu").tolist()
    count = len(stash.overflows)
    overflowed = [scaler for (scaler, _), value in zip(stash.overflows, is_set[:count], strict=True) if value]
    if overflowed:
        if is_skipped:
            announce([(scaler, scaler.scale_after_back_off().item()) for scaler in overflowed])
        return True
    if not any(is_set[count:]):
        return False
    gradients = stash.gradients_for_step()
    if not gradients or not fsdp.any_non_finite(gradients).item():
        return False
    if is_skipped:
        announce([(None, 0.0)])
    return True


@_torch.eager
def _end(optimizer: Optimizer, stash: AmpOptimizerState, skipped: bool | None) -> None:
    """After the optimizer's own step, or instead of it: the masters' gradients are used up, the model's stay.

    ``skipped``: None where only the device knows.
    """
    masters = stash.masters
    if masters and not skipped:
        push(masters)
    if stash.gradients is Gradients.LOST:
        say("Gradients of a scale_loss block were lost.  Skipping step")
    if skipped is False:
        stash.earlier_overflows = []
    elif stash.overflows:
        stash.note_earlier_overflows(stash.overflows)
    stash.overflows = []
    stash.mixed_gradient = None
    stash.gradients = Gradients.NONE
    gradient = stash.first_gradient()
    stash.last_step.skipped = skipped
    stash.last_step.first_gradient = None if gradient is None else weakref.ref(gradient)
    if skipped:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    stash.session.steps += 1
    try:
        if state.observers:
            notify("on_step", optimizer, skipped)
    finally:
        if masters:
            _use_up_gradients(optimizer, stash)


def _use_up_gradients(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Drop the masters' gradients, but leave those that another optimizer has yet to step with."""
    waited = waited_for(optimizer)
    left: dict[Master, weakref.ref[torch.Tensor]] = {}
    for master in stash.masters:
        grad = master.value.grad
        if master not in waited:
            master.added_grad = None
            master.value.grad = None
        elif grad is not None:
            left[master] = weakref.ref(grad)
    stash.last_step.left_to_others = left


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


# -- step(closure) -----------------------------------------------------------------------------------------------------
class _SkipStep(Exception):
    """Leaves the optimizer's own step from inside its closure: gradients overflowed."""


def evaluate(closure: Callable[[], Any], outside: Saved) -> Any:
    """Call ``closure`` with grad on and the casts of the code that called ``step``."""
    with torch.enable_grad(), restored(outside):
        return closure()


def _step_with_closure(
    optimizer: Optimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved, **kwargs: Any
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller. apex refused closures.

    When the first evaluation overflows, the step is skipped, and its loss returned. Where the optimizer has acted
    before (a later evaluation of LBFGS's search, that in the middle of SAM's step), it finds gradients of zero instead:
    it stops where it is, or goes back to where it was.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    has_gradients = stash.gradients is not Gradients.NONE or stash.pending is not None
    acts_before = has_gradients and not _evaluates_first(optimizer)
    closure_step = _ClosureStep(optimizer, closure, outside, acts_before)
    if acts_before and closure_step.unscale_and_check():
        loss = closure_step.evaluate()
        closure_step.unscale_and_check()  # notes what this evaluation has left; the step is skipped all the same
        _end(optimizer, stash, skipped=True)
        return loss
    try:
        result = original(closure_step.evaluate_or_skip, **kwargs)
    except _SkipStep:
        _end(optimizer, stash, skipped=True)
        return closure_step.first_loss
    _end(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    torch's optimizers and ours do, and once, LBFGS aside.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


class _ClosureStep:
    """The evaluations of one ``step(closure)``."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], outside: Saved, acts_before: bool) -> None:
        self._optimizer = optimizer
        self._stash: AmpOptimizerState = optimizer._amp_stash
        self._closure = closure
        self._outside = outside
        self._has_acted = acts_before
        self.first_loss: Any = None

    def evaluate_or_skip(self) -> Any:
        """Evaluate the closure for the optimizer; after an overflow, leave the step, or have it find zeros."""
        loss = self.evaluate()
        overflowed = self.unscale_and_check(is_skipped=not self._has_acted)
        if overflowed and not self._has_acted:
            raise _SkipStep
        if overflowed:
            for gradient in self._stash.gradients_for_step():
                gradient.zero_()
        self._has_acted = True
        return loss

    def evaluate(self) -> Any:
        """Evaluate the closure once, on weights that follow the masters."""
        self._stash.look_up(self._optimizer)
        settle(self._stash.masters)
        loss = evaluate(self._closure, self._outside)
        if self.first_loss is None:
            self.first_loss = loss
        return loss

    def unscale_and_check(self, is_skipped: bool = True) -> bool:
        """Make the gradients that are there ready for a step; return whether they overflowed."""
        stash = self._stash
        overflowed = _prepare(self._optimizer, stash, is_skipped=is_skipped)
        if overflowed:
            stash.note_earlier_overflows(stash.overflows)  # until the next evaluation clears the gradients
            stash.gradients = Gradients.NONE
        stash.overflows = []
        return overflowed


# -- zero_grad, add_param_group ----------------------------------------------------------------------------------------
@_torch.eager
def _zero_grad(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear master gradients as asked, and the half gradients of the model with them."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.masters:
        drop_cleared_gradients(stash.masters)  # before what is None becomes zeros
    original(*args, **kwargs)
    if stash.masters:
        _clear_half_gradients(stash.masters, *args, **kwargs)
    stash.earlier_overflows = []
    stash.mixed_gradient = None
    stash.aside = []
    for other in sharers(optimizer):
        if other._amp_stash.aside:
            _drop_shared_aside(stash, other._amp_stash)
    if stash.pending is not None:
        if state.models.sharded:
            fsdp.drop_waiting_gradients(stash.direct)
        stash.pending = None
        state.optimizers.pending.discard(optimizer)
    if stash.gradients is not Gradients.LOST:
        stash.gradients = Gradients.NONE


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


def _drop_shared_aside(cleared: AmpOptimizerState, other: AmpOptimizerState) -> None:
    """Drop what a block of ``other`` has put aside of parameters whose gradients are ``cleared``."""
    held = set(map(id, cleared.direct))
    other.aside = [(param, grad) for param, grad in other.aside if id(param) not in held]


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
    new = never_held(added)
    stash.look_up(optimizer)
    for other in sharers(optimizer):  # the new group may hold gradients of theirs that are not finite
        stash.note_earlier_overflows([*other._amp_stash.overflows, *other._amp_stash.earlier_overflows])
    was_a_loss_scaled = any(scaler.has_scaled for scaler in stash.session.scalers)
    if was_a_loss_scaled and stash.pending is None:
        drop_scaled_gradients(new)


def drop_scaled_gradients(params: list[torch.Tensor]) -> None:
    """Clear ``p.grad`` of those of ``params`` without masters, which no optimizer under amp has held before.

    Blocks give gradients to every parameter of a model, and unscale those of their optimizers: what the others have
    accumulated is still multiplied by the scales of that time. (The next block drops that of half params with masters.)
    """
    for param in params:
        if param.grad is not None and master_of(param) is None:
            param.grad = None
            misuse.warn_of("scaled gradients of a later param")


# -- apex's private names ----------------------------------------------------------------------------------------------
#: Masters exist since ``initialize``. Blocks call the last two, once a script has put its own in their place.
_LEGACY_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_lazy_init": lambda optimizer: optimizer._amp_stash.look_up(optimizer),
    "_lazy_init_maybe_master_weights": lambda optimizer: optimizer._amp_stash.look_up(optimizer),
    "_master_params_to_model_params": lambda optimizer: push(optimizer._amp_stash.masters),
    "_prepare_amp_backward": block.prepare_amp_backward,
    "_post_amp_backward": block.post_amp_backward,
}
