"""Who watches a run: the tools that record or explain what happens at ``scale_loss`` and ``step``.

An observer is an object with any of these methods; they are called in the thread of the script, and what they raise
goes through to it:

* ``on_forward(model, args, kwargs)`` and ``on_output(model, output)``: the forward of an initialized model, eager.
* ``on_scale_loss(loss, scaler, optimizers)``: a block opens; casts are as in the script.
* ``on_gradients(scaler, optimizers)``: a block that unscales has closed; gradients are unscaled, non-finite ones
  included, and neither clipped nor freed yet.
* ``on_step(optimizer, skipped)``: a step was made or skipped; casts are off. ``skipped`` is None while only the device
  knows; ``amp.step_was_skipped(optimizer)`` asks it.

Nobody watching costs one look into a dict per event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampcompat._state import state

_ROOM = "observers"


def observers() -> list[Any]:
    """The observers in force, in the order in which they are called; ``state.reset()`` forgets them."""
    watching: list[Any] = state.room(_ROOM, list)
    return watching


@contextmanager
def observing(observer: Any) -> Iterator[None]:
    """Have ``observer`` told of everything that happens inside."""
    observers().append(observer)
    try:
        yield
    finally:
        observers()[:] = [one for one in observers() if one is not observer]


def notify(event: str, *args: Any) -> None:
    """Call the method ``event`` of every observer that has it."""
    for observer in state.rooms.get(_ROOM, ()):
        method = getattr(observer, event, None)
        if method is not None:
            method(*args)
