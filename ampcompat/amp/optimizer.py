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
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp import block, misuse, nested, sharded
from ampcompat.amp.autocast import Saved, restored, save, uncast
from ampcompat.amp.masters import drop_cleared_gradients, follow_replacements, give_up_half, master_of, push, reconcile
from ampcompat.amp.observers import notify
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session
from ampcompat.amp.sharing import refuse_pending, waited_for
from ampcompat.amp.stash import AmpOptimizerState, Gradients, adopt_masters, announce, match_state, stepper

#: Repetitions of a closure's later evaluation that overflows; each halves the scale.
RETRIES = 4


def attach(optimizer: Optimizer, session: Session) -> None:
    """Put ``optimizer`` under ``session``; one that an earlier call owned changes hands, with its gradients."""
    stash = copy.copy(getattr(optimizer, "_amp_stash", None) or AmpOptimizerState(session))
    stash.session, stash.groups, stash.overflows = session, [], stash.overflows[:]
    stash.look_up(optimizer)  # adopts masters
    match_state(optimizer)
    if "optim" in vars(optimizer):
        nested.attach_zero(optimizer)
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
            if name == "step" and _torch.inner_optimizers(optimizer):
                original = nested.wrap_steps(optimizer, original, _step)
            setattr(optimizer, name, types.MethodType(_wrap(original, method), optimizer))


def detach(optimizer: Optimizer) -> None:
    """Undo :func:`attach`, but for the wrappers of methods, which pass on; scaled gradients are cleared."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    if stash.pending is not None:
        for param in stash.leaves():
            param.grad = None
        block.settle(optimizer, stash)
    adopt_masters(optimizer)
    match_state(optimizer)
    for name in ("_amp_stash", *_LEGACY_METHODS):
        vars(optimizer).pop(name, None)
    state.optimizers.live.pop(optimizer, None)
    state.optimizers.sharing = None


def remember(optimizer: Optimizer, undo: ExitStack) -> None:
    """Have ``undo`` put ``optimizer`` back as it is now."""
    for one in (optimizer, *_torch.inner_optimizers(optimizer)):
        for group in one.param_groups:
            undo.callback(group["params"].__setitem__, slice(None), list(group["params"]))
        undo.callback(one.state.update, dict(one.state))
        undo.callback(one.state.clear)
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


_torch.eager_itself(_wrap(print, print))  # all wrappers share its code


# -- step --------------------------------------------------------------------------------------------------------------
@_torch.eager_itself
def _step(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow.

    Host syncs: one, none with an optimizer that takes ``found_inf`` or where nothing is scaled.
    """
    closure = kwargs.pop("closure", None)
    if args:
        original, closure = _bound(original, args, closure)
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.block is not None and stash.in_block:
        raise RuntimeError(
            "optimizer.step() inside its scale_loss block - gradients are still multiplied by the loss scale there -"
            " leave the block first: `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step."
        )
    if closure is not None and not callable(closure):
        raise TypeError(
            f"optimizer.step got {type(closure).__name__} as closure - it must be callable - pass a function that"
            " returns the loss, or nothing."
        )
    casts = state.casts
    if closure is not None:
        outside = save(casts.device_types)
        with uncast():
            return _step_with_closure(optimizer, original, closure, outside, **kwargs)
    casting = casts.found is not None or any(map(torch.is_autocast_enabled, casts.device_types))
    with uncast() if casting else nullcontext():
        scaled = stash.overflows or stash.earlier_overflows or stash.reports or len(state.optimizers.pending)
        if stash.gradients is Gradients.UNSCALED and not (scaled or stash.masters):
            result = original(**kwargs)  # fast path: scale one, no masters
            stash.gradients, stash.skipped = Gradients.NONE, False
            stash.session.steps += 1
            if state.observers:
                notify("on_step", optimizer, False)
            return result
        # An optimizer that looks at ``found_inf`` skips on the device (torch's ``fused=True``).
        on_device = _decides_itself(optimizer)
        skip = _prepare(optimizer, stash, on_device)
        flags = _flags_to_lend(stash) if on_device and not skip else []
        step = functools.partial(original, **kwargs)
        if stash.left:
            step = functools.partial(_without_used_gradients, stash, step)
        if skip:
            result = None
        elif flags:
            result = _with_flags(optimizer, stash, flags, step)
        else:
            result = step()
        _end(optimizer, stash, None if flags else skip)
        return result


def _flags_to_lend(stash: AmpOptimizerState) -> list[tuple[LossScaler | None, torch.Tensor]]:
    """The flags any of which skips a step on the device; no scaler: of earlier overflows that are still there."""
    flags: list[tuple[LossScaler | None, torch.Tensor]] = [*stash.overflows]
    if stash.earlier_overflows:
        gradients = stash.gradients_in_use()
        if gradients:
            overflowed = _torch.any_of([flag for _, flag in stash.earlier_overflows])
            still_there = sharded.any_non_finite(gradients).to(overflowed.device, non_blocking=True)
            flags.append((None, overflowed * still_there))
    return flags


def _with_flags(
    optimizer: Optimizer,
    stash: AmpOptimizerState,
    flags: list[tuple[LossScaler | None, torch.Tensor]],
    step: Callable[[], Any],
) -> Any:
    """Step with ``flags`` lent to the optimizer; the message follows when they have reached the host."""
    optimizer.grad_scale = None
    optimizer.found_inf = _torch.any_of([flag for _, flag in flags])
    try:
        result = step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    report = []
    for scaler, flag in flags:
        scale = flag if scaler is None else scaler.scale_after_back_off()
        report.append((scaler, _torch.HostCopy([flag, scale])))
    stash.reports = [*stash.reports, report]
    return result


def _without_used_gradients(stash: AmpOptimizerState, step: Callable[[], Any]) -> Any:
    """Step without the gradients that the last step has used up, and left to another optimizer."""
    hidden = stash.used_up()
    for master in hidden:
        master.value.grad = None
    try:
        return step()
    finally:
        for master, grad in hidden.items():
            master.value.grad = grad


def _bound(step: Callable[..., Any], args: tuple[Any, ...], closure: Any) -> tuple[Callable[..., Any], Any]:
    """``step`` with the arguments that its class gave it beside the closure, and the closure."""
    first, *rest = args
    if first is not None and not callable(first) and "closure" not in inspect.signature(step).parameters:
        return functools.partial(step, *args), closure  # ``step(lr)``
    return (lambda given=None, **kwargs: step(given, *rest, **kwargs)) if rest else step, first


@_torch.eager
def _decides_itself(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` looks at its ``found_inf``: a wrapper that passes on what the one inside says does not."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False) or not (name in vars(optimizer) or hasattr(type(optimizer), name)):
        return False
    # Skip on the host a step that would make momentum: torch's fused SGD leaves it uninitialised if told to skip.
    momenta = [p for group in optimizer.param_groups if group.get("momentum") for p in group["params"]]
    return all(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in momenta if p.grad is not None)


@_torch.eager
def _prepare(optimizer: Optimizer, stash: AmpOptimizerState, on_device: bool = False) -> bool:
    """Have unscaled gradients and masters ready for a step; whether the host skips it."""
    stash.look_up(optimizer)
    if len(state.optimizers.pending):
        refuse_pending([optimizer])
        if stash.pending is not None:
            block.unscale_pending(optimizer)
    if stash.masters:
        if stash.skipped is None:  # no step yet
            nested.refuse_lookahead(optimizer)
        if drop_cleared_gradients(stash.masters):
            misuse.warn_of("half gradients edited")
        reconcile(stash.masters, stepping=True)
    if stash.reports:
        stash.report(wait=False)
    if stash.gradients is Gradients.LOST:
        return True
    if stash.gradients is not Gradients.UNSCALED:
        _warn_of_missing_gradients(stash)
    if on_device or not (stash.overflows or stash.earlier_overflows):
        return False
    if stash.reports:
        stash.report()
    return _has_overflowed(stash)


def _warn_of_missing_gradients(stash: AmpOptimizerState) -> None:
    """Warn of a step to which no block has given gradients."""
    if not stash.masters and all(scaler.is_one for scaler in stash.session.scalers):
        return
    first, old = stash.first_gradient(), stash.spent
    if stash.gradients is Gradients.EMPTY:
        misuse.warn_of("block without gradients")
    elif first is not None and (old is None or _torch.tensor_of(old) is not first):
        misuse.warn_of("no block")


def _has_overflowed(stash: AmpOptimizerState) -> bool:
    """Read whether gradients overflowed, and say so.

    Host syncs: one; two more to name the scale where they did; two more where an earlier overflow is still noted.
    """
    flags = [*stash.overflows, *stash.earlier_overflows]
    if len(flags) == 1 and not flags[0][1].item():
        return False
    device = flags[0][1].device
    values = torch.stack([flag.to(device) for _, flag in flags]).to("cpu").tolist()
    count = len(stash.overflows)
    overflowed = [scaler for (scaler, _), value in zip(stash.overflows, values[:count], strict=True) if value]
    if overflowed:
        announce([(scaler, scaler.scale_after_back_off().item()) for scaler in overflowed])
        return True
    if not any(values[count:]):
        return False
    gradients = stash.gradients_in_use()
    if not gradients or not sharded.any_non_finite(gradients).item():
        return False
    announce([(None, 0.0)])
    return True


@_torch.eager
def _end(optimizer: Optimizer, stash: AmpOptimizerState, skip: bool | None) -> None:
    """After the optimizer's own step, or instead of it: the masters' gradients are used up, the model's stay."""
    masters = stash.masters
    if masters and not skip:
        push(masters)
    if stash.gradients is Gradients.LOST:
        say("Gradients of a scale_loss block were lost.  Skipping step")
    if skip is False:
        stash.earlier_overflows = []
    elif stash.overflows:
        stash.note_earlier_overflows(stash.overflows)
    stash.overflows, stash.gradients, stash.skipped = [], Gradients.NONE, skip
    first = stash.first_gradient()
    stash.spent = None if first is None else weakref.ref(first)
    if skip:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
    stash.session.steps += 1
    try:
        if state.observers:
            notify("on_step", optimizer, skip)
    finally:
        if masters:
            _use_up_gradients(optimizer, stash)


def _use_up_gradients(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Drop the masters' gradients, but leave those that another optimizer has yet to step with."""
    waited = waited_for(optimizer)
    stash.left = {}
    for master in stash.masters:
        if master not in waited:
            master.folded = master.value.grad = None
        elif master.value.grad is not None:
            stash.left[master] = weakref.ref(master.value.grad)


# -- skipping ----------------------------------------------------------------------------------------------------------
def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped for an overflow. apex had no such call.

    Reads the device if only that knows: one host sync, with an optimizer that takes ``found_inf``.

    Args:
        optimizer: An optimizer, or a LARC around one; False for one that is not under amp.
    """
    stash = getattr(block.known(optimizer), "_amp_stash", None)
    if stash is not None:
        stash.report()
    return stash is not None and bool(stash.skipped)


# -- step(closure) -----------------------------------------------------------------------------------------------------
class _Abandon(Exception):
    """Leaves the optimizer's own step from inside its closure."""


def evaluate(closure: Callable[[], Any], outside: Saved) -> Any:
    """Call ``closure`` with grad on and the casts of the code that called ``step``."""
    with torch.enable_grad(), restored(outside):
        return closure()


def _step_with_closure(
    optimizer: Optimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved, **kwargs: Any
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller. apex refused closures.

    When the first evaluation overflows, the whole step is skipped, and its loss returned. A later one (LBFGS) is
    repeated at the lower scale. Optimizers that may act before they ask (LBFGS, SAM) are put back to where they were.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    losses: list[Any] = []

    def overflows(ask: bool = True) -> bool:
        """Call the closure on weights that follow the masters; whether the gradients that there are overflowed."""
        if ask:
            stash.look_up(optimizer)
            reconcile(stash.masters)
            losses.append(evaluate(closure, outside))
        found = _prepare(optimizer, stash)
        if found:
            stash.note_earlier_overflows(stash.overflows)  # until the next evaluation clears the gradients
            stash.gradients = Gradients.NONE
        stash.overflows = []
        return found

    def asked() -> Any:
        for attempt in range(1 + RETRIES if losses else 1):
            if attempt:
                optimizer.zero_grad()  # for a closure that leaves this to its optimizer
            if not overflows():
                return losses[-1]
        raise _Abandon

    # torch's optimizers and ours call the closure before they do anything, and once, LBFGS aside.
    asks_first = type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))
    found = stash.gradients is not Gradients.NONE or stash.pending is not None
    # SAM steps with the gradients that it finds, and asks then.
    skip = not asks_first and found and overflows(ask=False)
    if skip:
        overflows()  # for the loss to return
    else:
        undo = ExitStack()
        mid_step = not asks_first or type(optimizer).__name__ == "LBFGS"
        if mid_step and any(scaler.dynamic for scaler in stash.session.scalers):
            _snapshot(optimizer, undo)
        try:
            result = original(asked, **kwargs)
        except BaseException as error:
            undo.close()  # LBFGS cannot go on from the middle of its search
            skip = isinstance(error, _Abandon)
            if not skip:
                raise
    _end(optimizer, stash, skip)
    return losses[0] if skip else result


def _snapshot(optimizer: Optimizer, undo: ExitStack) -> None:
    """Have ``undo`` put params and state of ``optimizer`` back as they are now."""
    undo.callback(push, optimizer._amp_stash.masters)
    for group in optimizer.param_groups:  # some optimizers count steps here
        undo.callback(group.update, {name: value for name, value in group.items() if name != "params"})
        for param in group["params"]:
            undo.callback(param.detach().copy_, param.detach().clone())
    undo.callback(optimizer.state.update, {p: copy.deepcopy(dict(held)) for p, held in optimizer.state.items()})
    undo.callback(optimizer.state.clear)


# -- zero_grad, add_param_group ----------------------------------------------------------------------------------------
@_torch.eager
def _zero_grad(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear master gradients as asked, and the half gradients of the model with them."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.gradients is Gradients.UNSCALED or len(state.optimizers.live) > 1:
        drop_cleared_gradients(stash.masters)  # before what is None becomes zeros
    original(*args, **kwargs)
    if "_amp_hooked" in vars(optimizer):  # a ZeroRedundancyOptimizer: the one inside holds the masters
        stepper(optimizer).zero_grad(*args, **kwargs)
    for master in stash.masters:
        master.folded = master.half.grad = None
    stash.earlier_overflows = []
    if stash.pending is not None and state.models.sharded:
        sharded.drop_waiting_gradients(stash.direct)
    if stash.aside or stash.pending is not None:
        stash.aside, stash.pending = [], None
        state.optimizers.pending.discard(optimizer)
    if stash.gradients is not Gradients.LOST:
        stash.gradients = Gradients.NONE


def _add_param_group(optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add the group as torch does, then give its half params masters."""
    stash: AmpOptimizerState = optimizer._amp_stash
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    original(*args, **kwargs)
    masters = list(filter(None, map(master_of, optimizer.param_groups[-1]["params"])))
    if any(id(master.value) in held and not master.took_over for master in masters):
        optimizer.param_groups.pop()
        raise ValueError(
            "some parameters appear in more than one parameter group - the optimizer holds their float32 masters"
            " already - leave them out of the new group."
        )
    for master in masters:
        if master.took_over:  # this or another optimizer has trained it in the place of an old one
            give_up_half(master)
    for model in state.models.live:  # the new group may hold what was put into them since their last forward
        follow_replacements(model.modules())
    stash.look_up(optimizer)


# -- apex's private names ----------------------------------------------------------------------------------------------
#: Masters exist since ``initialize``. Blocks call the last two, once a script has put its own in their place.
_LEGACY_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_lazy_init": lambda one: one._amp_stash.look_up(one),
    "_lazy_init_maybe_master_weights": lambda one: one._amp_stash.look_up(one),
    "_master_params_to_model_params": lambda one: push(one._amp_stash.masters),
    "_prepare_amp_backward": block.prepare_amp_backward,
    "_post_amp_backward": block.post_amp_backward,
}
