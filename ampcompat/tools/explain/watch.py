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
from ampcompat.tools.explain.event import ARGUMENT, COLLECTIVE, UNSEEN, Event
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Probe

#: Steps that are watched after one was lost, and in the whole run.
WATCHED, MOST_WATCHED = 50, 200
_NOT_SHOWN = (
    " The step was watched as it ran, and no op shows why. Ops in CUDA graphs and in DataParallel are not seen: start"
    " the script once without graphs, on one device (CUDA_VISIBLE_DEVICES=0)."
)


class Watch:
    """Watch some steps after each that was lost and whose cause is not known."""

    def __init__(self) -> None:
        self.left = 0  # steps that are still to be watched
        self._left_of_all = MOST_WATCHED
        self._places: Places | None = None
        self._probe: Probe | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the probe is in the run."""
        return self._probe is not None

    def arm(self, steps: int = 0) -> int:
        """Watch the next ``steps``, or as many as are usual; returns how many are watched."""
        self.left = min(max(steps or WATCHED, self.left), self._left_of_all)
        return self.left

    def disarm(self) -> None:
        """Watch no more steps: the birth of the value is known."""
        self.left = 0

    def after_step(self, optimizer: Optimizer) -> None:
        """End the watch over a step of ``optimizer``; begin that over its next, if there is to be one."""
        if self._begun_after in (None, optimizer):
            self._begin_next(optimizer)

    def after_block(self) -> None:
        """End the watch at a block that no step follows, and begin the next, which any step may end."""
        if self._begun_after is None:
            self._begin_next(None)

    @property
    def _begun_after(self) -> Optimizer | None:
        """The optimizer after whose step the watch that is on has begun."""
        return self._optimizer() if self.is_on and self._optimizer is not None else None

    def _begin_next(self, optimizer: Optimizer | None) -> None:
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
        if self._probe is None:
            yield
        else:
            with self._probe.paused():
                yield

    def given_to(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note what comes into a forward and is not finite."""
        if self._probe is not None:
            self._probe.given_to(model, args, kwargs)

    def find(self, tensors: list[torch.Tensor]) -> tuple[Event | None, str]:
        """Find the origin of what is not finite in ``tensors``, a loss or gradients.

        Returns:
            The origin, or what is known where no op shows it, as sentences.
        """
        if self._probe is None:
            return None, ""
        event = self._probe.origin(tensors)
        if event is not None and event.op == COLLECTIVE:
            return None, " It came with the gradients of another rank."
        if event is None or event.op == UNSEEN:
            return None, _NOT_SHOWN
        if event.op == "buffer":
            writer = self._probe.writer_of(event)
            if writer is not None:
                self._probe.came_in.append(writer)
            return writer or event, ""
        if event.op == "parameter":
            # A static scale lets a loss that is not finite spoil the weights: the class weights of a loss came first.
            arguments = [one for one in self._probe.events if one.op == ARGUMENT and one.names_the_argument]
            return next(iter(arguments), event), ""
        return event, ""

    def came_in(self, event: Event) -> bool:
        """Whether ``event`` is the birth of a value that came into a forward with its input, or a buffer."""
        return self._probe is not None and event in self._probe.came_in
