"""Watch the code between a model and ``scale_loss``, which cannot be run again, the next times that it runs.

Armed only after a step was lost for something that no model did, and for some blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ampcompat import _torch
from ampcompat.tools.explain.forwards import Forward
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import ARGUMENT, Event, Probe
from ampcompat.tools.tensors import is_finite

#: Blocks that are watched after a step was lost so.
BLOCKS = 50


class LossWatch:
    """A probe in the run itself, from a model's output to the end of the block."""

    def __init__(self) -> None:
        self.blocks = 0
        self.probe: Probe | None = None
        self.modes = ExitStack()

    def arm(self) -> None:
        """Watch the next blocks."""
        self.blocks = BLOCKS

    def start(self, outputs: Iterable[torch.Tensor]) -> None:
        """A model has returned ``outputs``: watch from here, if armed."""
        if self.blocks > 0 and self.probe is None:
            places = Places({})
            self.probe = Probe(places)
            for output in outputs:
                self.probe.given(output, "output", "")
            self.modes.enter_context(places)
            self.modes.enter_context(self.probe)

    def stop(self) -> None:
        """Take the probe out of the run, if it is the innermost mode (the user may have entered one since)."""
        if self.probe is not None and _torch.innermost_dispatch_mode() is self.probe:
            self.modes.close()
            self.probe = None

    def look_at(self, loss: torch.Tensor) -> Event | None:
        """The origin of a loss that is not finite."""
        if self.probe is None:
            return None
        return self._of_this_code(self.probe.origin([loss]))

    def look_at_gradients(self, forwards: Iterable[Forward]) -> Event | None:
        """The origin of gradients that came into a model and are not finite."""
        if self.probe is None:
            return None
        grads = [g for forward in forwards for g in forward.grads if g is not None]
        event = None
        if not all(map(is_finite, grads)):
            event = self._of_this_code(self.probe.origin(grads))
        self.blocks -= 1
        self.stop()
        return event

    def _of_this_code(self, event: Event | None) -> Event | None:
        """What the watched code has to do with ``event``.

        Where the model's output was not finite already, running the model again tells why; but a static scale lets a
        loss that is not finite spoil the weights, and then the output is not finite because the loss was not.
        """
        if event is None or event.op != "output" or self.probe is None:
            return event
        arguments = [one for one in self.probe.events if one.op == ARGUMENT and one.names_the_argument]
        return next(iter(arguments), None)
