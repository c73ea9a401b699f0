"""``step``, ``zero_grad`` and ``add_param_group`` of an optimizer under amp, wrapped once, as bound methods.

Bound methods, with ``functools.wraps``: LR schedulers built before or after ``initialize`` patch and inspect
``optimizer.step``, and go on doing so without a warning.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ampcompat.amp import misuse, overflow
from ampcompat.amp.accumulation import put_all_aside
from ampcompat.amp.adoption import adopt_masters, match_state
from ampcompat.amp.backward_pass import finish_delayed, post_backward
from ampcompat.amp.casts import cast_state, run_uncast, save
from ampcompat.amp.closure import step_with_closure
from ampcompat.amp.gradients import drop_half, heed_cleared, take_unscaled
from ampcompat.amp.master_index import follow_replacements, master_of_half
from ampcompat.amp.master_passes import push_all, reconcile
from ampcompat.amp.masters import Master
from ampcompat.amp.observers import notify
from ampcompat.amp.optimizer_state import AmpOptimizerState, put_under_amp

if TYPE_CHECKING:
    from ampcompat.amp.session import Session


def attach(optimizer: Any, session: Session) -> None:
    """Put ``optimizer`` under ``session``; one that an earlier call owned changes hands."""
    stash = AmpOptimizerState(optimizer, session, getattr(optimizer, "_amp_stash", None))
    stash.parts(optimizer)  # adopts masters
    match_state(optimizer)
    optimizer._amp_stash = stash
    put_under_amp(optimizer)
    if "_amp_lazy_init" not in vars(optimizer):
        for name, action in _LEGACY_METHODS.items():
            setattr(optimizer, name, types.MethodType(action, optimizer))
    if not getattr(optimizer, "_amp_wrapped", False):
        optimizer._amp_wrapped = True
        for name, method in (("step", _step), ("zero_grad", _zero_grad), ("add_param_group", _add_param_group)):
            original = getattr(optimizer, name)
            setattr(optimizer, name, types.MethodType(_wrap(original, method), optimizer))


def detach(optimizer: Any) -> None:
    """Undo :func:`attach`: ``optimizer`` holds the model's own tensors and is a plain one.

    The wrappers of its methods stay, and pass on: LR schedulers have taken note of them. Gradients that are still
    scaled are cleared.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    masters, direct = stash.parts(optimizer)
    if stash.waiting is not None:
        for param in (*(master.half for master in masters), *direct):
            param.grad = None
    adopt_masters(optimizer)
    match_state(optimizer)
    for name in ("_amp_stash", *_LEGACY_METHODS):
        vars(optimizer).pop(name, None)


def remember(optimizer: Any) -> tuple[Any, ...]:
    """What :func:`put_back` needs."""
    groups = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    own = {name: value for name, value in vars(optimizer).items() if name in _OWN}
    return optimizer, groups, dict(optimizer.state), own


def put_back(before: tuple[Any, ...]) -> None:
    """Restore what :func:`remember` saw."""
    optimizer, groups, held, own = before
    for params, tensors in groups:
        params[:] = tensors
    optimizer.state.clear()
    optimizer.state.update(held)
    for name in _OWN:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(own)


def _wrap(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(original, "__func__", original))
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_amp_stash" in self.__dict__:
            return method(self, original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


def _step(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Step the masters and write them to the model; skip instead, once, after an overflow."""
    closure = kwargs.pop("closure", None)
    if args:
        original, closure = _bound(original, args, closure)
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.in_block:
        raise RuntimeError(
            "optimizer.step() inside its scale_loss block - gradients are still multiplied by the loss scale there -"
            " leave the block first: `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, then step."
        )
    masters, direct = stash.parts(optimizer)
    if closure is not None and not callable(closure):
        raise TypeError(
            f"optimizer.step got {type(closure).__name__} as closure - it must be callable - pass a function that"
            " returns the loss, or nothing."
        )
    if closure is not None:
        outside = save(cast_state().device_types)
        return run_uncast(step_with_closure, optimizer, original, closure, outside, **kwargs)
    if stash.plain:
        return run_uncast(_step_plain, optimizer, original, kwargs)
    return run_uncast(_step_uncast, optimizer, original, stash, masters, direct, kwargs)


def _bound(step: Callable[..., Any], args: tuple[Any, ...], closure: Any) -> tuple[Callable[..., Any], Any]:
    """``step`` with the arguments that its class gave it beside the closure, and the closure."""
    first, *rest = args
    if first is not None and not callable(first) and "closure" not in inspect.signature(step).parameters:
        return functools.partial(step, *args), closure  # ``step(lr)``

    def bound(given: Any = None, **kwargs: Any) -> Any:
        return step(given, *rest, **kwargs)

    return bound if rest else step, first


def _step_plain(optimizer: Any, original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    result = original(**kwargs)
    notify("on_step", optimizer, False)
    return result


def _step_uncast(
    optimizer: Any,
    original: Callable[..., Any],
    stash: AmpOptimizerState,
    masters: list[Master],
    direct: list[torch.Tensor],
    kwargs: dict[str, Any],
) -> Any:
    finish_delayed(optimizer, stash)
    replaced = heed_cleared(masters)
    follow_replacements(masters)
    misuse.warn_at_step(stash, masters, direct, replaced)
    if not stash.blocks:
        take_unscaled(masters)
    reconcile(masters, stepping=True)
    result, ended, skip = None, False, False
    verdict: dict[str, Any] = {}
    try:
        skip, verdict = overflow.decide(optimizer, stash)
        if skip:
            ended = True
        else:
            drop_half(masters)  # before the optimizer makes anything: the peak of memory is in there
            result, ended = original(**kwargs), True
        overflow.end_step(optimizer, stash, masters, skip, verdict)
    except BaseException:
        if ended:
            overflow.end_step(optimizer, stash, masters, skip, verdict)
        else:
            overflow.withdraw(optimizer)
        raise
    notify("on_step", optimizer, stash.skipped)
    return result


def _prepare_backward(optimizer: Any) -> None:
    """Entry of a ``scale_loss`` block by hand (apex: ``_prepare_amp_backward``)."""
    put_all_aside(optimizer, optimizer._amp_stash)


def _zero_grad(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear master gradients as asked, and the half gradients of the model with them."""
    stash: AmpOptimizerState = optimizer._amp_stash
    masters, _direct = stash.parts(optimizer)
    cleared = False
    try:
        _, cleared = original(*args, **kwargs), True
        _forget_gradients(stash, masters)
    except BaseException:
        if cleared:
            _forget_gradients(stash, masters)
        raise


def _forget_gradients(stash: AmpOptimizerState, masters: list[Master]) -> None:
    drop_half(masters)
    stash.forget_scaled()  # inside a block, what it had put aside is cleared as well
    stash.seen = []


def _add_param_group(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Add the group as torch does, then give its half params masters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = False
    try:
        _, added = original(*args, **kwargs), True
        _adopt_group(optimizer, held)
    except ValueError:
        raise
    except BaseException:
        if added:
            _adopt_group(optimizer, held)
        raise


def _adopt_group(optimizer: Any, held: set[int]) -> None:
    masters = [master_of_half(p) for p in optimizer.param_groups[-1]["params"]]
    if any(id(master.value) in held for master in masters if master is not None):
        optimizer.param_groups.pop()
        raise ValueError(
            "some parameters appear in more than one parameter group - the optimizer holds their float32 masters"
            " already - leave them out of the new group."
        )
    optimizer._amp_stash.parts(optimizer)


def _lazy_init(optimizer: Any) -> None:
    """Look the parameters up again; masters exist since ``initialize``."""
    optimizer._amp_stash.parts(optimizer)


def _masters_to_model(optimizer: Any) -> None:
    push_all(optimizer._amp_stash.parts(optimizer)[0])


#: Methods that legacy code calls on the optimizer by their private names.
_LEGACY_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_lazy_init": _lazy_init,
    "_lazy_init_maybe_master_weights": _lazy_init,
    "_master_params_to_model_params": _masters_to_model,
    "_prepare_amp_backward": _prepare_backward,
    "_post_amp_backward": post_backward,
}

#: Instance attributes that :func:`attach` sets.
_OWN = ("_amp_stash", "_amp_wrapped", "step", "zero_grad", "add_param_group", *_LEGACY_METHODS)
