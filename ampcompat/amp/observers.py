"""Tell observers, the tools that record or explain a run, what happens at ``scale_loss`` and ``step``.

An observer is an object with any of these methods, called in the thread of the script; what they raise reaches it:

* ``on_initialize()``: a call of ``initialize`` has returned.
* ``on_forward(model, args, kwargs)`` and ``on_output(model, output)``: the forward of an initialized model, eager.
* ``on_scale_loss(loss, scaler, optimizers)``: a block opens; nothing has changed yet, and casts are as in the script.
* ``on_scaled_loss(block, scaled)``: its loss was scaled; older gradients are set aside.
* ``on_block_end(block, has_failed)``: it has closed, by an exception where it has failed.
* ``on_gradients(scaler, optimizers)``: a block has closed; gradients are unscaled, non-finite ones included, and
  neither clipped nor freed yet.
* ``on_failure(error)``: an exception leaves the forward of an initialized model, or a block.
* ``before_step(optimizer)``: a step, or one evaluation of its closure, has its gradients: they are unscaled, and
  masters follow the model.
* ``on_step(optimizer, skipped)``: a step was made or skipped; casts are off. ``skipped`` is None while only the device
  knows; ``amp.step_was_skipped(optimizer)`` asks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ampcompat._state import Part, state


@dataclass(eq=False)
class ObserverState(Part):
    """The tools that watch this process.

    Attributes:
        observers: The observers in force, in the order in which they are called.
    """

    observers: list[Any] = field(default_factory=list)


observer_state = state.add(ObserverState())


def observers() -> list[Any]:
    """Return the observers in force, in the order in which they are called."""
    return observer_state.observers


@contextmanager
def observing(observer: Any) -> Iterator[None]:
    """Tell ``observer`` of what happens inside."""
    observer_state.observers.append(observer)
    try:
        yield
    finally:
        observer_state.observers[:] = [other for other in observer_state.observers if other is not observer]


def notify(event: str, *args: Any) -> None:
    """Call the method ``event`` of every observer that has it. On hot paths, first ask whether there are any."""
    for observer in list(observer_state.observers):
        method = getattr(observer, event, None)
        if method is not None:
            method(*args)
