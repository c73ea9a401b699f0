"""Decide where casts are on: the ambient autocast of a process and what takes precedence over it.

========================================================  =======================================================
code (the first match wins)                               casts
========================================================  =======================================================
device types that hold no params of an initialized model  off
a user's own ``torch.autocast`` region                    the user's
``disable_casts()``                                       off
Python ``autograd.Function`` backward bodies              the casts of the forward
the autograd engine                                       off
``optimizer.step``                                        off; inside its closure as outside
the forward of an initialized model                       the casts of its session, in any thread
anywhere else in the thread that called ``initialize``    the casts of the latest session at O1 or O4 ("ambient")
========================================================  =======================================================

The contexts that change casts for a time are in :mod:`.contexts`. Ambient code runs without autocast's weight
cache: it has no end at which the cache could be dropped.

While any session casts functions, three places of torch are patched, all with undo: the autograd engine, which must run
with casts off (C++ backward formulas would otherwise cast the gradients of a float32 region to half); bodies of Python
``autograd.Function``s inside it, which get the casts of their forward again (old custom functions multiply half by
float); and ``torch.autocast`` regions, which are counted, so that forwards inside them leave casts to the user. apex
patched none of these: its casts were in Python functions, which C++ does not call (``apex/amp/amp.py: init``).
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.casts import cpu_convolution, installation
from ampcompat.amp.casts.contexts import (
    OFF,
    CastingSession,
    Casts,
    CastsOff,
    Policy,
    Saved,
    cast_state,
    disabled_depth,
    restore,
    restored,
    save,
    tell_compiled_forwards,
)

T = TypeVar("T")


# -- ambient casts -----------------------------------------------------------------------------------------------------
def set_ambient(device_types: Iterable[str]) -> None:
    """Make the casts of the latest session the ambient ones of this thread, on ``device_types`` and no others."""
    latest = _latest_casts()
    wanted = tuple(sorted(set(device_types)))
    if cast_state.original is None and latest.enabled:
        cast_state.original = _state_outside_of_regions()
    for device_type in set(cast_state.device_types).difference(wanted):
        torch.set_autocast_enabled(device_type, False)
    cast_state.ambient = latest if latest.enabled else None
    cast_state.device_types = wanted
    cast_state.owner = threading.get_ident()
    apply_ambient_casts()


def _latest_casts() -> Casts:
    """Return the casts of the latest session that still casts functions; :data:`OFF` if there is none."""
    enabled = [session.policy.casts for session in casting_sessions() if session.policy.casts.enabled]
    return enabled[-1] if enabled else OFF


def casting_sessions() -> list[CastingSession]:
    """List the sessions that cast functions and have a live model, or were given none; the latest last."""
    policies = live_policies()
    return [session for session in cast_state.sessions if session.policy in policies or not session.has_models]


def live_policies() -> list[Policy]:
    """List the policies of all models that are alive, each once."""
    policies = [model.__dict__.get("_amp_policy") for model in cast_state.models]
    return list(dict.fromkeys(policy for policy in policies if policy is not None))


def end_casts_with(model: torch.nn.Module) -> None:
    """End the casts that ``model`` brings into force when it is collected."""
    if model not in cast_state.models:
        weakref.finalize(model, model_collected).atexit = False
        cast_state.models.add(model)


def model_collected() -> None:
    """End the ambient casts with the last model whose session cast functions.

    The garbage collector may call this at any time and in any thread. Where something else is in force, the next block
    or the end of a region brings torch's state in line. While the compiler traces, nothing may change, neither
    autocast's state nor what traced code reads of ours: the next forward or backward pass follows. Patches of torch
    stay until the next ``initialize``.
    """
    cast_state.collected_in_trace = cast_state.ambient is not None and _torch.is_tracing()
    if cast_state.ambient is None or cast_state.collected_in_trace:
        return
    latest = _latest_casts()
    ambient = cast_state.ambient  # once more: another model may have been collected meanwhile
    if ambient is not None and not latest.same_as(ambient):
        cast_state.ambient = latest if latest.enabled else None
        apply_ambient_casts()


def _state_outside_of_regions() -> Saved:
    """Autocast's state as it is outside of the user's ``torch.autocast`` regions."""
    device_types = _torch.autocast_device_types()
    if not _torch.autocast_nesting():
        return save(device_types)
    dtypes = {"cpu": torch.bfloat16, "xla": torch.bfloat16}  # torch's own, when a process begins
    devices = [(device_type, False, dtypes.get(device_type, torch.float16)) for device_type in device_types]
    return Saved(tuple(devices), cache=True)


def ensure_ambient_casts() -> None:
    """Set the ambient casts again where a look at the first device type tells that they are not in force."""
    device_types = cast_state.device_types
    if device_types and torch.is_autocast_enabled(device_types[0]) != (cast_state.ambient is not None):
        apply_ambient_casts()


def apply_ambient_casts() -> None:
    """Set the ambient casts again, where nothing else is in force in this thread.

    A ``torch.autocast`` region that was open while ``initialize`` ran puts back, at its exit, what it found at its
    entry: the casts from before ``initialize``.
    """
    if cast_state.original is None or cast_state.owner != threading.get_ident():
        return
    if cast_state.thread.forwards or cast_state.thread.off or _torch.autocast_nesting():
        return
    ambient = cast_state.ambient
    for device_type in cast_state.device_types:
        torch.set_autocast_enabled(device_type, ambient is not None)
        if ambient is not None:
            torch.set_autocast_dtype(device_type, ambient.dtype)
    casts_somewhere = ambient is not None and bool(cast_state.device_types)
    torch.set_autocast_cache_enabled(cast_state.original.cache and not casts_somewhere)


def _switch_off_in_forked_process() -> None:
    """Switch casts off: a forked worker (DataLoader) inherits the casts of this thread."""
    if cast_state.ambient is not None:
        for device_type in cast_state.device_types:
            torch.set_autocast_enabled(device_type, False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_off_in_forked_process)


# -- patches of torch --------------------------------------------------------------------------------------------------
def install_casting(device_types: Iterable[str]) -> None:
    """Install everything that casting needs on ``device_types``: patches, op rules, registered functions."""
    device_types = list(device_types)
    if cast_state.patches is None:
        _patch_torch()
    installation.install(device_types)
    installation.wrap_registered()
    if "cpu" in device_types:
        cpu_convolution.install()


def _patch_torch() -> None:
    with ExitStack() as undo:
        _torch.keep_torch_functions_traceable(undo)
        _torch.patch_engine(_without_casts, undo)
        _torch.patch_function_bodies(_record_forward_casts, _with_forward_casts, undo)
        _torch.patch_autocast_regions(_region_changed, undo)
        cast_state.patches = undo.pop_all()
    state.undo_once(uninstall_casting)


def uninstall_casting() -> None:
    """Leave autocast in this thread, and torch, as they were before the first :func:`install_casting`. Idempotent."""
    if cast_state.original is not None:
        torch.clear_autocast_cache()
        restore(cast_state.original)
    if cast_state.patches is not None:
        cast_state.patches.close()
    cast_state.original = None
    cast_state.ambient = None
    cast_state.collected_in_trace = False
    cast_state.device_types = ()
    cast_state.patches = None
    cast_state.undo_registered.close()
    installation.uninstall()
    has_half_models = any(policy.half_dtype for policy in live_policies())
    if not has_half_models:
        cpu_convolution.uninstall()


def _without_casts(engine: Callable[..., T]) -> Callable[..., T]:
    """Wrap the autograd engine to run without casts."""

    @functools.wraps(engine)
    def run(*args: object, **kwargs: object) -> T:
        if cast_state.collected_in_trace:
            model_collected()
        with CastsOff():
            return engine(*args, **kwargs)

    return run


def _record_forward_casts(ctx: Any) -> None:
    """Remember on a Function's context the casts of its forward, where there are any."""
    saved = save(cast_state.device_types)
    if any(enabled for _, enabled, _ in saved.devices):
        ctx._amp_forward_casts = saved


def _with_forward_casts(apply_backward: Callable[..., object]) -> Callable[..., object]:
    """Wrap what runs the backward body of a Function to run it with the casts of its forward."""

    @functools.wraps(apply_backward)
    def apply(self: object, *args: object) -> object:
        forward_casts: Saved | None = getattr(self, "_amp_forward_casts", None)
        if forward_casts is None or disabled_depth():
            return apply_backward(self, *args)
        # Without the forward's weight cache: a weight may have changed since.
        with restored(forward_casts._replace(cache=False)):
            return apply_backward(self, *args)

    return apply


def _region_changed(device_type: str, change: int, other_dtype: bool) -> None:
    """Count the user's ``torch.autocast`` regions on ``device_type``.

    Args:
        device_type: The device type of the region.
        change: 1 where one has begun, -1 where one has ended.
        other_dtype: Whether it changed autocast's dtype: the cache is keyed by weight alone, whatever the dtype.
    """
    regions = cast_state.thread.regions
    regions[device_type] = max(0, regions.get(device_type, 0) + change)  # it may have begun before the patch
    if other_dtype:
        torch.clear_autocast_cache()
    has_begun = change == 1
    if has_begun and device_type in cast_state.device_types and not torch.is_autocast_enabled(device_type):
        tell_compiled_forwards(to_cast=False)  # the region puts the flag back at its exit
    apply_ambient_casts()
