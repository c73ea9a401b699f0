"""Decide where casts are on: the ambient autocast of a process and what takes precedence over it.

========================================================  ==============================================
code                                                      casts
========================================================  ==============================================
device types that hold no params of an initialized model  off
the forward of an initialized model                       those of the call that owns it, in any thread
anywhere else in the thread that called ``initialize``    those of the latest ``initialize`` ("ambient")
the autograd engine                                       off
Python ``autograd.Function`` backward bodies              those of the forward
``optimizer.step``                                        off; inside its closure as outside
``disable_casts()``                                       off
a user's own ``torch.autocast`` region                    the user's
========================================================  ==============================================

Autocast itself is always asked whether casts are on; only :class:`switched`, :class:`uncast` and :func:`restored`
change that for a time. Autocast's weight cache is fatal when it outlives its use (weights never update), so ambient
code runs without it; it is on inside the outermost forward of an initialized model and dropped at its exit. While casts
are off, the flag of the cache says whether somebody switched them off: compiled forwards see no other state of their
thread (:func:`mark_switched_off`).

While any call casts functions, three places of torch are patched, all with undo: the autograd engine, which must run
with casts off (a float32 region's gradients would be halved by C++ backward formulas otherwise); bodies of Python
``autograd.Function``s inside it, which get the casts of their forward again (old custom functions multiply half by
float); and ``torch.autocast`` regions, which tell the forwards inside them that the user decides. apex had none of
these: its patches of Python functions were on everywhere but in C++ (``apex/amp/amp.py: init``).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp import cpu_convolution, rules

T = TypeVar("T")


class Casts(NamedTuple):
    """Tell autocast to do nothing, or to cast to ``dtype``."""

    enabled: bool
    dtype: torch.dtype

    def same_as(self, other: Casts) -> bool:
        """Whether both do the same; casts that are off have no dtype to compare."""
        return self.enabled == other.enabled and (not self.enabled or self.dtype == other.dtype)


OFF = Casts(False, torch.float16)


class Saved(NamedTuple):
    """Autocast's state in one thread."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool


def save(device_types: Iterable[str]) -> Saved:
    """Autocast's state for ``device_types`` in this thread."""
    devices = tuple([(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in device_types])
    return Saved(devices, torch.is_autocast_cache_enabled())


def restore(saved: Saved) -> None:
    """Put back what :func:`save` read."""
    for device_type, enabled, dtype in saved.devices:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(saved.cache)


@contextmanager
def restored(saved: Saved) -> Iterator[None]:
    """Context with the casts that :func:`save` read elsewhere."""
    before = save([device_type for device_type, _, _ in saved.devices])
    restore(saved)
    try:
        yield
    finally:
        if state.casts.thread.forwards:  # one that trains a part of its model
            torch.clear_autocast_cache()
        restore(before)


class switched:
    """Context of the forward of a model on ``device_type`` that casts functions.

    The outermost such forward owns the weight cache, and one of another dtype inside it must not find its casts.
    """

    def __init__(self, casts: Casts, device_type: str) -> None:
        self.casts, self.device_type = casts, device_type

    @_torch.eager
    def __enter__(self) -> None:
        casts, thread, types = self.casts, state.casts.thread, state.casts.device_types
        if self.device_type not in types:
            types = (*types, self.device_type)
        self.before, self.forwards = save(types), thread.forwards
        self.is_outermost = self.clears = not thread.forwards
        if self.is_outermost:
            torch.autocast_increment_nesting()  # so that a torch.autocast region inside keeps the cache at its exit
            torch.set_autocast_cache_enabled(not _torch.CACHES_WEIGHTS_ACROSS_GRAD_MODES)
        elif torch.get_autocast_dtype(self.device_type) != casts.dtype:
            self.clears = True
            torch.clear_autocast_cache()
        thread.forwards += 1
        for device_type in types:
            torch.set_autocast_enabled(device_type, True)
            torch.set_autocast_dtype(device_type, casts.dtype)

    @_torch.eager
    def __exit__(self, *exc: object) -> None:
        state.casts.thread.forwards = self.forwards
        if self.is_outermost:
            torch.autocast_decrement_nesting()
        if self.clears:
            torch.clear_autocast_cache()
        restore(self.before)


class uncast:
    """Context without casts in this thread; with ``disable``, forwards inside it have none either."""

    def __init__(self, disable: bool = False) -> None:
        self.disable = disable

    @_torch.eager
    def __enter__(self) -> None:
        room = state.casts
        thread = room.thread
        self.depths = thread.off, thread.disabled
        thread.off += 1
        thread.disabled += self.disable
        self.casting = list(filter(torch.is_autocast_enabled, room.device_types))
        for device_type in self.casting:
            torch.set_autocast_enabled(device_type, False)
        self.cache = torch.is_autocast_cache_enabled()
        mark_switched_off(bool(thread.disabled))

    @_torch.eager
    def __exit__(self, *exc: object) -> None:
        thread = state.casts.thread
        thread.off, thread.disabled = self.depths
        if thread.forwards:  # one that trains a part of its model
            torch.clear_autocast_cache()
        for device_type in self.casting:
            torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_cache_enabled(self.cache)


def mark_switched_off(by_somebody: bool) -> None:
    """Note in autocast's cache flag, which is without effect while casts are off, whether somebody switched them off.

    Compiled forwards read it (:func:`is_decided`). Of what a thread is in the middle of, the compiler sees autocast's
    own state alone: it reads no other state of a thread, and does not compile again when that changes.
    """
    found = state.casts.found
    if found is not None:
        torch.set_autocast_cache_enabled(found.cache != by_somebody)


def is_decided(device_type: str, now: Casts) -> bool:
    """Whether a compiled forward leaves the casts of ``device_type``, which are ``now``, to those who set them.

    These are a user's ``torch.autocast`` region, ``disable_casts`` and a forward around it. Not among them are the
    ambient casts, and a thread in which nobody has set any.
    """
    ambient = state.casts.ambient if device_type in state.casts.device_types else None
    if now.enabled:
        return ambient is None or not now.same_as(ambient)
    if not _torch.COMPILER_SEES_CACHE_FLAG:
        return ambient is not None
    found = state.casts.found
    return found is not None and torch.is_autocast_cache_enabled() != found.cache


class DisabledCasts(threading.local, ContextDecorator):
    """What :func:`disable_casts` returns: may be entered again while it is open, and by several threads."""

    def __init__(self) -> None:
        self.open: list[uncast] = []  # those of this thread, outermost first

    @_torch.eager
    def __enter__(self) -> None:
        context = uncast(disable=True)
        context.__enter__()
        self.open.append(context)

    @_torch.eager
    def __exit__(self, *exc: object) -> None:
        self.open.pop().__exit__(*exc)


def disable_casts() -> DisabledCasts:
    """Return a context, or a decorator of functions, in which no function is cast, at any level.

    It nests, and ends with exceptions too. As in apex (``apex/amp/handle.py: disable_casts``), which switched one flag
    of its handle.
    """
    return DisabledCasts()


def set_ambient(casts: Casts, device_types: Iterable[str]) -> None:
    """Make ``casts`` the ambient casts of this thread, on every device type in ``device_types`` and no other."""
    room, wanted = state.casts, tuple(sorted(set(device_types)))
    if room.found is None and casts.enabled:
        room.found = save(types := _torch.autocast_device_types())
        if _torch.autocast_nesting():  # outside the user's regions it is as torch begins
            begin = {"cpu": torch.bfloat16, "xla": torch.bfloat16}
            room.found = Saved(tuple((d, False, begin.get(d, torch.float16)) for d in types), cache=True)
    for device_type in set(room.device_types).difference(wanted):
        torch.set_autocast_enabled(device_type, False)
    room.ambient, room.device_types = casts if casts.enabled else None, wanted
    room.owner = threading.get_ident()
    assert_ambience()


def assert_ambience() -> None:
    """Set the ambient casts again, where nothing else is in force in this thread.

    A ``torch.autocast`` region that was open while ``initialize`` ran puts back, at its exit, what it found at its
    entry: the casts from before ``initialize``.
    """
    room = state.casts
    if room.found is None or room.owner != threading.get_ident():
        return
    if room.thread.forwards or room.thread.off or _torch.autocast_nesting():
        return
    for device_type in room.device_types:
        torch.set_autocast_enabled(device_type, room.ambient is not None)
        if room.ambient is not None:
            torch.set_autocast_dtype(device_type, room.ambient.dtype)
    is_ambient = room.ambient is not None and bool(room.device_types)
    torch.set_autocast_cache_enabled(room.found.cache and not is_ambient)


def switch_this_forward(on: bool) -> None:
    """Switch casts inside the forward of a casting model that this thread is in the middle of, until its end."""
    thread = state.casts.thread
    if thread.forwards and not thread.off:
        for device_type in state.casts.device_types:
            torch.set_autocast_enabled(device_type, on)


def _forked() -> None:
    """Switch casts off: a forked worker (DataLoader) inherits this thread's, but works beside it."""
    for device_type in state.casts.device_types if state.casts.ambient else ():
        torch.set_autocast_enabled(device_type, False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def cover(device_types: Iterable[str]) -> None:
    """Install everything that casting needs on ``device_types``: patches, op rules, registered functions."""
    device_types = list(device_types)
    room = state.casts
    if room.patches is None:
        with ExitStack() as undo:
            _torch.patch_engine(_engine, undo)
            _torch.patch_function_bodies(_record_forward, _body, undo)
            _torch.patch_autocast_regions(_region, undo)
            room.patches = undo.pop_all()
        state.undo_once(uncover)
    rules.acquire(device_types)
    rules.wrap_registered()
    if "cpu" in device_types:
        cpu_convolution.acquire()


def uncover() -> None:
    """Leave autocast in this thread, and torch, as they were before the first :func:`cover`. Idempotent."""
    room = state.casts
    if room.found is not None:
        torch.clear_autocast_cache()
        restore(room.found)
    if room.patches is not None:
        room.patches.close()
    room.found, room.ambient, room.device_types, room.patches = None, None, (), None
    room.functions.close()
    rules.release()
    if not any(model.__dict__["_amp_policy"].half for model in state.models.live):
        cpu_convolution.release()


def _engine(original: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> T:
        with uncast():
            return original(*args, **kwargs)

    return run


def _record_forward(ctx: Any) -> None:
    """Remember on a Function's context the casts of its forward, where there are any."""
    saved = save(state.casts.device_types)
    if any(enabled for _, enabled, _ in saved.devices):
        ctx._amp_forward_casts = saved


def _body(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def apply(self: object, *args: object) -> object:
        forward: Saved | None = getattr(self, "_amp_forward_casts", None)
        if forward is None or state.casts.thread.disabled:
            return original(self, *args)
        # Without the forward's weight cache: a weight may have changed since.
        with restored(forward._replace(cache=False)):
            return original(self, *args)

    return apply


def _region(device_type: str, change: int, other_dtype: bool) -> None:
    """Count the user's ``torch.autocast`` regions; the cache is keyed by weight alone, whatever the dtype."""
    regions = state.casts.thread.regions
    regions[device_type] = max(0, regions.get(device_type, 0) + change)  # it may have begun unpatched
    if other_dtype:
        torch.clear_autocast_cache()
    entered = change == 1
    if entered and device_type in state.casts.device_types and not torch.is_autocast_enabled(device_type):
        mark_switched_off(True)  # the region puts the flag back at its exit
    assert_ambience()
