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
from typing import NamedTuple

import torch

from ampcompat import _torch
from ampcompat._state import state


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
        state.undo.callback(end_ambience)
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


class casts_off:
    """Casts are off inside, on every device type that has them; gives the state outside, for :func:`casts_as`.

    With ``disable``, forwards of initialized models inside stay off as well. A class: half the price of a generator.
    """

    __slots__ = ("disable", "saved", "thread")

    def __init__(self, disable: bool = False) -> None:
        self.disable = disable

    def __enter__(self) -> Saved:
        room = cast_state()
        self.thread, self.saved = thread, saved = room.thread, save(room.device_types)
        thread.off += 1
        thread.disabled += self.disable
        switch(room.device_types, OFF, saved.cache)
        return saved

    def __exit__(self, *exc: object) -> None:
        self.thread.off -= 1
        self.thread.disabled -= self.disable
        restore(self.saved)


@contextmanager
def casts_as(saved: Saved) -> Iterator[None]:
    """Inside a :func:`casts_off` block: casts as they were outside it."""
    thread = cast_state().thread
    inside, off = save(cast_state().device_types), thread.off
    thread.off = thread.disabled
    restore(saved)
    try:
        yield
    finally:
        thread.off = off
        restore(inside)


def casts_for_forward(casts: Casts, device_type: str) -> Casts | None:
    """The casts that the forward of a model owned by ``casts`` runs with; None where it must leave them alone."""
    thread = cast_state().thread
    if thread.disabled:
        return OFF
    if thread.regions.get(device_type):
        return None
    return casts


class ForwardCasts:
    """Context of one forward: sets its casts, owns the weight cache when outermost, undoes both.

    Args:
        casts: From :func:`casts_for_forward`, or the decision stamped on a DataParallel replica.
        device_type: Where the model is.
    """

    __slots__ = ("casts", "device_type", "mixed", "outermost", "saved", "thread")

    def __init__(self, casts: Casts, device_type: str) -> None:
        self.casts, self.device_type = casts, device_type

    def __enter__(self) -> None:
        room = cast_state()
        self.thread = thread = room.thread
        types = room.device_types if self.device_type in room.device_types else (*room.device_types, self.device_type)
        self.saved = save(types)
        casts = self.casts
        self.outermost = casts.enabled and thread.forwards == 0
        cache = self.saved.cache
        if self.outermost:
            torch.autocast_increment_nesting()  # so that a torch.autocast region inside keeps the cache at its exit
            cache = not _torch.caches_weights_across_grad_modes()
        # The cache is keyed by weight alone: what a forward of another dtype put there must not be found here.
        self.mixed = not self.outermost and casts.enabled and torch.get_autocast_dtype(self.device_type) != casts.dtype
        if self.mixed:
            torch.clear_autocast_cache()
        thread.forwards += casts.enabled
        switch(types, casts, cache)

    def __exit__(self, *exc: object) -> None:
        self.thread.forwards -= self.casts.enabled
        if self.outermost:
            torch.autocast_decrement_nesting()
        if self.outermost or self.mixed:
            torch.clear_autocast_cache()
        restore(self.saved)


def _in_forked_child() -> None:
    """A forked worker (DataLoader) inherits this thread's autocast; it works beside the model, not in it."""
    room: CastState | None = state.rooms.get("casts")
    if room is not None and room.found is not None and room.ambient.enabled:
        switch(room.device_types, OFF, torch.is_autocast_cache_enabled())


_register_at_fork: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register_at_fork is not None:
    _register_at_fork(after_in_child=_in_forked_child)
