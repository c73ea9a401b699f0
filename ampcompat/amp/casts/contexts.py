"""The casts of a thread: what they are, and the contexts that change them for a time.

Autocast's own state says whether casts are on; this module keeps no second record of it. Three contexts change it:

* :class:`ForwardCasts` switches casts on in the forward of a model that casts functions.
* :class:`CastsOff` switches them off. :func:`casts_off` does so in code that may be compiled, :func:`disable_casts` is
  for users.
* :func:`restored` brings back the casts of an earlier moment, for closures and backward bodies.

Autocast has a cache of half copies of weights. A copy that outlives a change of its weight is wrong: the model would
compute with the old weight. So the cache is on only inside the outermost forward that casts functions, and is emptied
when that forward ends. A cache that lived for a whole iteration would save casts of models that run several times in
it, but would hide writes through ``.data`` between two forwards.

A compiled forward cannot read this module's state. Autocast's cache flag tells it whether it must stay uncast: the flag
has no other effect while casts are off. The section on compiled forwards, the last one here, has the details.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from ampcompat import _torch
from ampcompat._state import Part, state


class Casts(NamedTuple):
    """Whether functions are cast, and to what."""

    enabled: bool
    dtype: torch.dtype

    def same_as(self, other: Casts) -> bool:
        """Whether both do the same; casts that are off have no dtype to compare."""
        if not self.enabled:
            return not other.enabled
        return other.enabled and self.dtype == other.dtype


OFF = Casts(False, torch.float16)


# -- autocast's state in a thread --------------------------------------------------------------------------------------
class Saved(NamedTuple):
    """Autocast's state in one thread: per device type, whether it is on, and its dtype; and the flag of its cache."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool


def save(device_types: Iterable[str]) -> Saved:
    """Read autocast's state for ``device_types`` in this thread."""
    devices = [
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in device_types
    ]
    return Saved(tuple(devices), torch.is_autocast_cache_enabled())


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
        if cast_state.thread.forwards:  # a forward that trains a part of its model
            torch.clear_autocast_cache()
        restore(before)


# -- what is in force in the process -----------------------------------------------------------------------------------
class Policy(Protocol):
    """What casting needs from a model's policy, ``model._amp_policy``."""

    casts: Casts
    half_dtype: torch.dtype | None  # what weights were cast to


class CastingSession(Protocol):
    """What casting needs from a session."""

    has_models: bool
    device_types: set[str]

    @property
    def policy(self) -> Policy:
        """How its models run."""


class ThreadCasts(threading.local):
    """What one thread is currently inside.

    Attributes:
        forwards: Depth of casting forwards of initialized models; the outermost one owns autocast's weight cache.
        off: Depth of engine runs, optimizer steps and ``disable_casts`` blocks.
        regions: Open ``torch.autocast`` regions of the user, by device type.
        switched_off: The context that is open since a script has set ``handle._is_active`` to False.
    """

    forwards = 0
    off = 0
    switched_off: CastsOff | None = None
    regions: dict[str, int]

    def __init__(self) -> None:
        self.regions = {}


@dataclass(eq=False)
class CastState(Part):
    """The ambient casts of the process (see :mod:`ampcompat.amp.casts.ambience`).

    Attributes:
        sessions: Sessions that cast functions, the latest last. A session whose models are gone leaves the list when
            the next session comes.
        models: Every live model under amp, copies included (``devices.ModelIndex`` leaves copies out).
        ambient: The ambient casts: of the latest of these sessions that still casts functions. None without one.
        device_types: Where ambient casts are on: the device types of initialized models.
        owner: The thread that has the ambient casts: it called ``initialize`` last.
        collected_in_trace: Whether a model was collected while the compiler traced, and its casts are yet to end.
        original: Autocast's state before the first change, for undo; None while no policy casts functions.
        patches: Undo of the patches that casting needs; None while they are not installed.
        undo_registered: Undo of the wrappers around functions that users registered.
        cpu_convolution: Undo of the CPU's own half convolutions; None while torch's are in force.
        thread: What the current thread is inside.
    """

    sessions: list[CastingSession] = field(default_factory=list)
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    ambient: Casts | None = None
    device_types: tuple[str, ...] = ()
    owner: int = 0
    collected_in_trace: bool = False
    original: Saved | None = None
    patches: ExitStack | None = None
    undo_registered: ExitStack = field(default_factory=ExitStack)
    cpu_convolution: ExitStack | None = None
    thread: ThreadCasts = field(default_factory=ThreadCasts)


cast_state = state.add(CastState())


# -- casts on ----------------------------------------------------------------------------------------------------------
class ForwardCasts:
    """Context of a model's forward on ``device_type`` that casts functions; the outermost owns the weight cache."""

    def __init__(self, casts: Casts, device_type: str) -> None:
        self.casts = casts
        self.device_type = device_type

    @_torch.eager
    def __enter__(self) -> None:
        casts = self.casts
        thread = cast_state.thread
        device_types = cast_state.device_types
        if self.device_type not in device_types:
            device_types = (*device_types, self.device_type)
        self.before = save(device_types)
        self.forwards = thread.forwards
        self.is_outermost = not thread.forwards
        if self.is_outermost:
            torch.autocast_increment_nesting()  # so that a torch.autocast region inside keeps the cache at its exit
            torch.set_autocast_cache_enabled(not _torch.CACHES_WEIGHTS_ACROSS_GRAD_MODES)
        thread.forwards += 1
        for device_type in device_types:
            torch.set_autocast_enabled(device_type, True)
            torch.set_autocast_dtype(device_type, casts.dtype)

    @_torch.eager
    def __exit__(self, *exc: object) -> None:
        cast_state.thread.forwards = self.forwards
        if self.is_outermost:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        restore(self.before)


# -- casts off ---------------------------------------------------------------------------------------------------------
_DISABLED = "ampcompat.disabled_casts"

#: ``disabled_depth()`` is how many :func:`disable_casts` blocks this thread is in: forwards inside stay uncast, too. A
#: backward body for tensors on a device runs in a thread of the autograd engine, which is in the blocks of the thread
#: that started it.
disabled_depth = functools.partial(_torch.stashed_in_thread, _DISABLED)


class CastsOff:
    """Context without casts in this thread.

    Args:
        device_type: A device type to switch casts off on, beside the device types where amp casts.
        in_forwards: Whether forwards of initialized models inside have no casts either.
        weights_may_change: Whether code inside may write weights: casts of them that the forward around has cached are
            dropped at the exit.
    """

    def __init__(
        self, device_type: str | None = None, *, in_forwards: bool = False, weights_may_change: bool = True
    ) -> None:
        self.device_type = device_type
        self.in_forwards = in_forwards
        self.weights_may_change = weights_may_change

    @_torch.eager
    def __enter__(self) -> None:
        thread = cast_state.thread
        self.off = thread.off
        self.disabled = disabled_depth()
        thread.off += 1
        if self.in_forwards:
            _torch.stash_in_thread(_DISABLED, self.disabled + 1)
        device_types = cast_state.device_types
        other = self.device_type
        if other is not None and other not in device_types and _torch.can_autocast(other):
            device_types = (*device_types, other)
        self.switched_off = list(filter(torch.is_autocast_enabled, device_types))
        for device_type in self.switched_off:
            torch.set_autocast_enabled(device_type, False)
        self.cache = torch.is_autocast_cache_enabled()
        tell_compiled_forwards(to_cast=not self.in_forwards and self.disabled == 0)

    @_torch.eager
    def __exit__(self, *exc: object) -> None:
        thread = cast_state.thread
        thread.off = self.off
        if self.in_forwards:
            _torch.stash_in_thread(_DISABLED, self.disabled)
        if thread.forwards and self.weights_may_change:
            torch.clear_autocast_cache()
        for device_type in self.switched_off:
            torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_cache_enabled(self.cache)


def casts_off(device_type: str) -> AbstractContextManager[None]:
    """Return a context without casts on ``device_type`` for a function or module, in compiled code too.

    The compiler traces ``torch.autocast``; the bookkeeping of :class:`CastsOff` would break its graph.
    """
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return CastsOff(device_type, in_forwards=True, weights_may_change=False)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Return a context, or a decorator of functions, in which no function is cast, at any level.

    It nests, and ends with exceptions too. As in apex (``apex/amp/handle.py: disable_casts``), which switched one flag
    of its handle.
    """
    with CastsOff(in_forwards=True):
        yield


def switch_casts(on: bool) -> None:
    """Begin what :func:`disable_casts` does in this thread, or end it: a flag, which does not nest."""
    thread = cast_state.thread
    if on and thread.switched_off is not None:
        thread.switched_off.__exit__()
        thread.switched_off = None
    elif not on and thread.switched_off is None:
        state.undo_once(_switch_casts_on)
        thread.switched_off = CastsOff(in_forwards=True)
        thread.switched_off.__enter__()


def _switch_casts_on() -> None:
    switch_casts(on=True)


def are_switched_off() -> bool:
    """Whether :func:`switch_casts` has switched casts off in this thread."""
    return cast_state.thread.switched_off is not None


# -- the channel to compiled forwards ----------------------------------------------------------------------------------
# A compiled forward switches the casts of its model on, unless the code around it has decided otherwise. It cannot ask
# this module: the compiler would bake the answer of the first call into the graph. Of a thread's state, the compiler
# looks at autocast's alone at each call, and compiles again when that has changed: whether it is on, its dtype, and the
# flag of its cache. While casts are off nothing is cached, so that flag is free. It carries one bit:
#
# - as it was before amp: casts are off here, but a forward switches its own on;
# - the other way round: forwards stay uncast, too (``disable_casts``, a user's ``torch.autocast`` region with
#   ``enabled=False``).
#
# :func:`tell_compiled_forwards` writes the bit, :func:`leaves_casts_alone` reads it. So a compiled forward at O1 finds:
#
# ==============================  =======================  ======================  ==================================
# where it is called              autocast                 cache flag              what it does
# ==============================  =======================  ======================  ==================================
# the thread of ``initialize``    on, the ambient casts    as before amp           nothing: its casts are on already
# another thread                  off                      as before amp           switches its own casts on
# ``disable_casts``               off                      the other way round     nothing: no casts
# ``torch.autocast`` of the user  on, another dtype        the user's              nothing: the user's casts
# ==============================  =======================  ======================  ==================================
#
# torch 2.4 does not compile again when the flag has changed, so there the bit is not read.
def tell_compiled_forwards(*, to_cast: bool) -> None:
    """Tell compiled forwards, while casts are off here, whether they are to switch on the casts of their models."""
    original = cast_state.original
    if original is not None:
        torch.set_autocast_cache_enabled(original.cache == to_cast)


def leaves_casts_alone(device_type: str, now: Casts) -> bool:
    """Whether a compiled forward leaves the casts of ``device_type``, which are ``now``, to the code that set them.

    That code is a user's ``torch.autocast`` region, ``disable_casts`` or a forward around it. Neither ambient casts nor
    a thread in which no casts were set are such code.
    """
    ambient = cast_state.ambient if device_type in cast_state.device_types else None
    if now.enabled:
        return ambient is None or not now.same_as(ambient)
    if not _torch.COMPILER_SEES_CACHE_FLAG:
        return ambient is not None
    original = cast_state.original
    return original is not None and torch.is_autocast_cache_enabled() != original.cache
