"""Puts optimizers under amp and takes them out: their methods are wrapped once, as bound methods.

Bound methods, with ``functools.wraps``: LR schedulers built before or after ``initialize`` patch and inspect
``optimizer.step``, and go on doing so without a warning. apex patched the same methods
(``apex/amp/_process_optimizer.py``) and, for one step after an overflow, ``step`` once more
(``apex/amp/handle.py: scale_loss``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ampcompat import _torch
from ampcompat.amp.half.masters import push_all
from ampcompat.amp.scaling import backward_methods
from ampcompat.amp.scaling.clearing import clear_by_optimizer
from ampcompat.amp.scaling.exchange import give_back_params, match_state
from ampcompat.amp.scaling.groups import follow_groups, look_up, note_when_gone
from ampcompat.amp.scaling.optimizer import add_param_group, prepare_masters, step
from ampcompat.amp.scaling.optimizer_index import optimizer_index
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState
from ampcompat.amp.scaling.session import Session


def attach(optimizer: AmpOptimizer, session: Session, kind: type[OptimizerState]) -> None:
    """Put ``optimizer`` under ``session``; one that an earlier call owned changes hands, with its gradients.

    The caller calls ``follow_groups`` when it has attached all.

    Args:
        optimizer: It gets a stash, and methods of amp.
        session: The call that owns it from now on.
        kind: The class of its stash, which adds apex's names.
    """
    stash: OptimizerState | None = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        stash = kind(session)
        optimizer._amp_stash = stash
    stash.session = session
    stash.groups = []  # to be looked up anew, at this level
    optimizer_index.live.pop(optimizer, None)
    optimizer_index.live[optimizer] = None  # the latest call's come last
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
    look_up(optimizer)
    optimizer_index.live.pop(optimizer, None)
    give_back_params(optimizer)
    match_state(optimizer)
    note_when_gone(optimizer, set())
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
    stash.is_stepping = True
    try:
        return replaced(*args, **kwargs)
    finally:
        stash.is_stepping = False


# -- methods beside these ----------------------------------------------------------------------------------------------
def _look_up(optimizer: AmpOptimizer) -> None:
    """Follow the groups of ``optimizer``. apex made the masters here; those of amp exist since ``initialize``."""
    look_up(optimizer)


#: The first two are amp's own, the others have apex's private names. Blocks call the last two where a script has put
#: its own in their place.
_METHODS: dict[str, Callable[..., Any]] = {
    "_amp_prepare_masters": prepare_masters,
    "_amp_follow_step": _follow_step,
    "_amp_lazy_init": _look_up,
    "_lazy_init_maybe_master_weights": _look_up,
    "_master_params_to_model_params": lambda optimizer: push_all(optimizer._amp_stash.leaves.masters),
    "_prepare_amp_backward": backward_methods.prepare_amp_backward,
    "_post_amp_backward": backward_methods.post_amp_backward,
}
