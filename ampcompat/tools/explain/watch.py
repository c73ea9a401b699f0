"""The probe in the run itself: entered after a step of an optimizer, left after its next.

Between the two it sees every op of the script's, so that what is not finite in a loss or a gradient has an origin.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from ampcompat import _torch
from ampcompat.tools.core import Args, Kwargs, Optimizer, live_models
from ampcompat.tools.explain.birth import Birth
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Probe

#: Steps that are watched after one was lost, and in the whole run.
WATCHED, MOST_WATCHED = 50, 200


class Watch:
    """Watch some steps after each that was lost and whose birth is not known."""

    def __init__(self) -> None:
        self.left = 0  # steps that are still to be watched
        self._left_of_all = MOST_WATCHED
        self._places: Places | None = None
        self._probe: Probe | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None  # after whose step the watch that is on has begun

    @property
    def is_on(self) -> bool:
        """Whether the probe is in the run."""
        return self._probe is not None

    def arm(self, steps: int = 0) -> int:
        """Watch the next ``steps``, or as many as are usual; returns how many are watched."""
        self.left = min(max(steps or WATCHED, self.left), self._left_of_all)
        return self.left

    def disarm(self) -> None:
        """Watch no more steps: the birth is known."""
        self.left = 0

    def after_step(self, optimizer: Optimizer | None) -> None:
        """End the watch over a step of ``optimizer``, or a block of none; begin the next, if there is to be one."""
        begun_after = None if self._probe is None or self._optimizer is None else self._optimizer()
        if begun_after not in (None, optimizer):
            return
        self.stop()
        if self.left > 0:
            self.left -= 1
            self._left_of_all -= 1
            self._optimizer = None if optimizer is None else weakref.ref(optimizer)
            self._places = Places(live_models())
            self._probe = Probe(self._places)
            _torch.enter_outermost(self._places)
            _torch.enter_outermost(self._probe)

    def stop(self) -> None:
        """Take the probe out of the run."""
        if self._probe is not None:
            _torch.leave_outermost(self._probe)
            _torch.leave_outermost(self._places)
            self._probe = self._places = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ops are explain's own."""
        with contextlib.nullcontext() if self._probe is None else self._probe.paused():
            yield

    def given_to(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note what comes into a forward and is not finite."""
        if self._probe is not None:
            self._probe.given_to(model, args, kwargs)

    def given_loss(self, scaled: torch.Tensor) -> None:
        """Follow the gradients of a scaled loss: they have the loss scale in them."""
        if self._probe is not None and scaled.requires_grad:
            scaled.register_hook(self._probe.made.note_scaled)  # type: ignore[no-untyped-call]

    def find(self, tensors: list[torch.Tensor]) -> Birth | None:
        """Find the birth of what is not finite in ``tensors``, a loss or gradients; None where no op shows it."""
        if self._probe is None:
            return None
        birth = self._probe.birth_of(tensors)
        if birth is not None and birth.kind == "buffer":
            return self._probe.writer_of(birth) or birth
        if birth is not None and birth.kind == "parameter":
            # A static scale lets a loss that is not finite spoil the weights: the class weights of a loss came first.
            return self._probe.argument() or birth
        return birth
