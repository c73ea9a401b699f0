"""Check what the steps of one optimizer write."""

from __future__ import annotations

from ampcompat.tools.core import Optimizer
from ampcompat.tools.explain import numbers, weights
from ampcompat.tools.explain.growth import History
from ampcompat.tools.explain.messages import Message


class StepChecks:
    """The steps of one optimizer.

    Attributes:
        seen: How many it was asked for.
        made: The number of the last that was not skipped; 0 before.
        watched: Whether weights and state were finite when they were last looked at.
        versions: Of the weights, then.
        history: How large the weights were, after each of the last steps.
        faulty: Whether the loss or a gradient of the step to come is not finite.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = self.made = 0
        self.history = History()
        self.faulty = False
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Look at the weights as something other than a step has written them. One host sync."""
        self.watched, sizes = weights.examine(optimizer)
        self.versions = weights.versions(optimizer)
        self.history.begin(sizes)

    def look_again(self, optimizer: Optimizer) -> None:
        """Before a step: it is to answer for its own writing alone. One host sync, if the weights were written."""
        if self.watched and self.versions != weights.versions(optimizer):
            self._look(optimizer)

    def after(self, optimizer: Optimizer) -> list[Message]:
        """Look at what a step wrote (one host sync a device), and at its numbers the first time; what is to be told."""
        written = None
        if self.watched:
            self.watched, sizes = weights.examine(optimizer)
            self.history.add(sizes, optimizer)
            if not self.watched and not self.faulty:  # else the fault was told
                written = weights.first_written(optimizer)
        self.versions = weights.versions(optimizer)
        messages: list[Message] = []
        if self.made == 0:
            blamed = [] if written is None else written.numbers
            unheld = [one for one in numbers.unheld(optimizer) if one not in blamed]
            messages += [numbers.numbers_message(unheld)] if unheld else []
        if written is not None:
            # A division by zero is infinite at any learning rate.
            growth = None if written.numbers else self.history.growth(optimizer)
            messages.append(weights.weights_message(written, self.seen, growth))
        return messages
