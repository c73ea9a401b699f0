"""The casts of one forward of an initialized model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.casts import OFF, Casts, Saved, cast_state, restore, save, switch


def casts_for_forward(casts: Casts, device_type: str) -> Casts | None:
    """The casts that the forward of a model owned by ``casts`` runs with; None where it must leave them alone."""
    thread = cast_state().thread
    if thread.disabled:
        return OFF
    if thread.regions.get(device_type):
        return None
    return casts


def run_forward(casts: Casts, device_type: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``forward(*args, **kwargs)`` under its casts; the outermost one owns the weight cache. Undoes both.

    Args:
        casts: From :func:`casts_for_forward`, or the decision stamped on a DataParallel replica.
        device_type: Where the model is.
        forward: The model's own.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    room = cast_state()
    thread = room.thread
    types = room.device_types if device_type in room.device_types else (*room.device_types, device_type)
    saved, forwards = save(types), thread.forwards
    outermost = casts.enabled and forwards == 0
    # The cache is keyed by weight alone: what a forward of another dtype put there must not be found here.
    mixed = not outermost and casts.enabled and torch.get_autocast_dtype(device_type) != casts.dtype
    nesting = _torch.autocast_nesting() if outermost else None
    cache = not _torch.caches_weights_across_grad_modes() if outermost else saved.cache
    try:
        try:
            if outermost:
                torch.autocast_increment_nesting()  # so that a torch.autocast region inside keeps the cache at its exit
            if mixed:
                torch.clear_autocast_cache()
            thread.forwards = forwards + casts.enabled
            switch(types, casts, cache)
            return forward(*args, **kwargs)
        finally:
            _leave(forwards, nesting, outermost or mixed, saved)
    except BaseException:
        _leave(forwards, nesting, outermost or mixed, saved)  # Ctrl-C may have struck in the way out
        raise


def _leave(forwards: int, nesting: int | None, cached: bool, saved: Saved) -> None:
    cast_state().thread.forwards = forwards
    while nesting is not None and _torch.autocast_nesting() > nesting:
        torch.autocast_decrement_nesting()
    if cached:
        torch.clear_autocast_cache()
    restore(saved)
