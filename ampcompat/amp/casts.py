"""Where casts are on: the ambient autocast of a process and what stands above it.

==========================================================  =====================================================
code                                                        casts
==========================================================  =====================================================
device types that hold no params of an initialized model    off
the forward of an initialized model                         those of the call that owns it, in any thread
anywhere else in the thread that called ``initialize``      those of the latest ``initialize`` ("ambient")
the autograd engine                                         off
Python ``autograd.Function`` backward bodies                those of the forward
``optimizer.step``                                          off; inside its closure as outside
``disable_casts()``                                         off
a user's own ``torch.autocast`` region                      the user's
==========================================================  =====================================================

Autocast's weight cache is fatal when it outlives its use (weights never update), so ambient code runs without it; it
is on inside the outermost forward of an initialized model and dropped at that forward's exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._undo import on_undo

T = TypeVar("T")


class Casts(NamedTuple):
    """What autocast shall do: nothing, or cast to ``dtype``."""

    enabled: bool
    dtype: torch.dtype

    def same_as(self, other: Casts) -> bool:
        """Whether both do the same; the dtype of casts that are off is of no matter."""
        return self.enabled == other.enabled and (not self.enabled or self.dtype == other.dtype)


OFF = Casts(False, torch.float16)


class Saved(NamedTuple):
    """Autocast's state in one thread, as :func:`restore` puts it back."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool


class _Thread(threading.local):
    """What one thread is in the middle of."""

    forwards = 0  # forwards of initialized models that own the weight cache
    off = 0  # engine runs, optimizer steps and disable_casts blocks
    disabled = 0  # of these, disable_casts blocks: forwards stay off in them too
    regions: dict[str, int]  # open torch.autocast regions of the user, by device type

    half_models: list[torch.nn.Module]  # half models in whose forward this thread is

    def __init__(self) -> None:
        self.regions, self.half_models = {}, []


class CastState:
    """The ambient casts and the device types they hold on."""

    def __init__(self) -> None:
        self.device_types: tuple[str, ...] = ()
        self.ambient = OFF
        self.thread = _Thread()
        self.found: Saved | None = None  # torch as it was before the first change, for undo
        self.owner = 0  # the thread that is ambient: the one that called initialize last


def cast_state() -> CastState:
    """The process's cast state."""
    room: CastState = state.room("casts", CastState)
    return room


def save(device_types: Iterable[str]) -> Saved:
    """Autocast's state for ``device_types`` in this thread."""
    return Saved(
        tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]),
        torch.is_autocast_cache_enabled(),
    )


def restore(saved: Saved) -> None:
    """Put back what :func:`save` read."""
    for device_type, enabled, dtype in saved.devices:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(saved.cache)


def switch(device_types: Iterable[str], casts: Casts, cache: bool) -> None:
    """Set autocast for ``device_types`` in this thread."""
    for device_type in device_types:
        torch.set_autocast_enabled(device_type, casts.enabled)
        if casts.enabled:
            torch.set_autocast_dtype(device_type, casts.dtype)
    torch.set_autocast_cache_enabled(cache)


def set_ambient(casts: Casts, device_types: Iterable[str]) -> None:
    """Make ``casts`` the ambient casts of this thread, on every device type in ``device_types`` and no other."""
    room = cast_state()
    wanted = tuple(sorted(set(device_types)))
    if room.found is None and casts.enabled:
        room.found = _outside_regions(save(_torch.autocast_device_types()))
        on_undo(state.undo, end_ambience)
    gone = [d for d in room.device_types if d not in wanted]
    switch(gone, OFF, torch.is_autocast_cache_enabled())
    room.ambient, room.device_types, room.owner = casts, wanted, threading.get_ident()
    assert_ambience()


def _outside_regions(now: Saved) -> Saved:
    """What a thread inside ``torch.autocast`` regions has outside them: torch's own defaults."""
    if not _torch.autocast_nesting():
        return now
    defaults = {"cpu": torch.bfloat16, "xla": torch.bfloat16}
    return Saved(tuple((d, False, defaults.get(d, torch.float16)) for d, _, _ in now.devices), True)


def assert_ambience() -> None:
    """Set the ambient casts again, where nothing else is in force in this thread.

    A ``torch.autocast`` region that was open while ``initialize`` ran puts back, at its exit, what it found at its
    entry: the casts from before ``initialize``.
    """
    room = cast_state()
    thread = room.thread
    if room.found is None or room.owner != threading.get_ident():
        return
    if thread.forwards or thread.off or _torch.autocast_nesting():
        return
    switch(room.device_types, room.ambient, cache=room.found.cache and not room.ambient.enabled)


def end_ambience() -> None:
    """Leave autocast in this thread as it was before the first ``initialize``."""
    room = cast_state()
    if room.found is not None:
        torch.clear_autocast_cache()
        restore(room.found)
    room.found, room.ambient, room.device_types = None, OFF, ()


# What follows changes a thread's casts for the time of a call. Ctrl-C may strike at any line, that of the way out
# included, so the way out sets and does not count, and is gone a second time when anything was raised.


def run_uncast(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)`` with casts off, on every device type that has them."""
    room = cast_state()
    if room.found is None and not any(map(torch.is_autocast_enabled, room.device_types)):
        return function(*args, **kwargs)  # nobody casts: neither amp nor a region of the user's
    thread = room.thread
    outside = _Outside(save(room.device_types), thread.off, thread.disabled)
    try:
        try:
            thread.off += 1
            switch(room.device_types, OFF, outside.saved.cache)
            return function(*args, **kwargs)
        finally:
            _go_outside(thread, outside)
    except BaseException:
        _go_outside(thread, outside)
        raise


@contextmanager
def casts_off(disable: bool = False) -> Iterator[Saved]:
    """As :func:`run_uncast`, for a block; gives the state outside, for :func:`casts_as`.

    With ``disable``, forwards of initialized models inside stay off as well.
    """
    room = cast_state()
    thread = room.thread
    outside = _Outside(save(room.device_types), thread.off, thread.disabled)
    try:
        try:
            thread.off, thread.disabled = outside.off + 1, outside.disabled + disable
            switch(room.device_types, OFF, outside.saved.cache)
            yield outside.saved
        finally:
            _go_outside(thread, outside)
    except BaseException:
        _go_outside(thread, outside)
        raise


@contextmanager
def casts_as(saved: Saved) -> Iterator[None]:
    """Inside of :func:`run_uncast` or :func:`casts_off`: casts as they were outside."""
    thread = cast_state().thread
    outside = _Outside(save(cast_state().device_types), thread.off, thread.disabled)
    try:
        try:
            restore(saved)
            yield
        finally:
            _go_outside(thread, outside)
    except BaseException:
        _go_outside(thread, outside)
        raise


class _Outside(NamedTuple):
    """A thread's casts before a change."""

    saved: Saved
    off: int
    disabled: int


def _go_outside(thread: _Thread, outside: _Outside) -> None:
    thread.off, thread.disabled = outside.off, outside.disabled
    if thread.forwards:  # a model whose forward trains a part of itself: weights move, or are about to
        torch.clear_autocast_cache()
    restore(outside.saved)


def _in_forked_child() -> None:
    """A forked worker (DataLoader) inherits this thread's autocast; it works beside the model, not in it."""
    room: CastState | None = state.rooms.get("casts")
    if room is not None and room.found is not None and room.ambient.enabled:
        switch(room.device_types, OFF, torch.is_autocast_cache_enabled())


_register_at_fork: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register_at_fork is not None:
    _register_at_fork(after_in_child=_in_forked_child)
