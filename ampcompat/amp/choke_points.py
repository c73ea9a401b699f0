"""The few places of torch that are patched while any call casts functions: all with undo.

* the autograd engine, which must run with casts off: C++ backward formulas autocast would halve the precision of a
  float32 region's gradients;
* bodies of Python ``autograd.Function``s inside it, which run with the casts of their forward again: old custom
  functions multiply half by float;
* ``torch.autocast`` regions, which tell the forwards inside them that the user decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._undo import on_undo
from ampcompat.amp import casts as _casts
from ampcompat.amp.casts import cast_state


def install() -> None:
    """Patch torch, once; the undo goes on ``state.undo`` and is also run by :func:`remove`."""
    if "choke points" in state.rooms:
        return
    with ExitStack() as undo:
        _torch.patch_engine(_engine, undo)
        _torch.patch_function_bodies(_record_forward, _body, undo)
        _patch_regions(undo)
        on_undo(state.undo, remove)
        state.rooms["choke points"] = undo.pop_all()


def remove() -> None:
    """Undo :func:`install`; does nothing the second time."""
    undo: ExitStack | None = state.rooms.get("choke points")
    if undo is not None:
        undo.close()
        state.rooms.pop("choke points", None)


def _engine(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _casts.run_uncast(original, *args, **kwargs)

    return run


def _record_forward(ctx: Any) -> None:
    """Remember on a Function's context the casts of its forward, where there are any."""
    saved = _casts.save(cast_state().device_types)
    if any(enabled for _, enabled, _ in saved.devices):
        ctx._amp_forward_casts = saved


def _body(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        forward: _casts.Saved | None = getattr(self, "_amp_forward_casts", None)
        if forward is None or cast_state().thread.disabled:
            return original(self, *args)
        # The forward's cache belongs to the forward: a weight may have changed since.
        with _casts.casts_as(forward._replace(cache=False)):
            return original(self, *args)

    return apply


def _patch_regions(undo: ExitStack) -> None:
    """Count the user's ``torch.autocast`` regions per device type and thread.

    The cache is cleared where a region changes the dtype: it is keyed by weight alone.
    """
    region: Any = torch.amp.autocast_mode.autocast
    enter, leave = region.__enter__, region.__exit__

    @functools.wraps(enter)
    def counted_enter(self: Any) -> Any:
        before = torch.get_autocast_dtype(self.device)
        if _torch.is_scripting():
            return enter(self)
        regions, count = cast_state().thread.regions, _counts(self)
        entered = False
        try:
            result, entered = enter(self), True
            regions[self.device], self._amp_counted = count[0] + 1, count[1] + 1
            if torch.get_autocast_dtype(self.device) != before:
                torch.clear_autocast_cache()
        except BaseException:  # nobody will call __exit__
            regions[self.device], self._amp_counted = count
            if entered:
                leave(self, None, None, None)
            raise
        return result

    @functools.wraps(leave)
    def counted_exit(self: Any, *exc: Any) -> Any:
        before = torch.get_autocast_dtype(self.device)
        if _torch.is_scripting():
            return leave(self, *exc)
        regions, count = cast_state().thread.regions, _counts(self)
        if count[1]:
            count = max(0, count[0] - 1), count[1] - 1

        def settle() -> None:
            regions[self.device], self._amp_counted = count
            if torch.get_autocast_dtype(self.device) != before:
                torch.clear_autocast_cache()
            _casts.assert_ambience()

        left = False
        try:
            result, left = leave(self, *exc), True
            settle()
        except BaseException:
            if left:
                settle()
            raise
        return result

    _torch.replace(region, "__enter__", counted_enter, undo)
    _torch.replace(region, "__exit__", counted_exit, undo)


def _counts(region: Any) -> tuple[int, int]:
    """Open regions on the device of ``region`` in this thread, and how often ``region`` itself is open."""
    return cast_state().thread.regions.get(region.device, 0), getattr(region, "_amp_counted", 0)
