"""What a rule of the watch is, and what several of them ask about an optimizer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat.amp.scaling.open_blocks import OpenBlock
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer


class Rule:
    """An observer that looks for one mistake; ``ampcompat.amp.observers`` lists the events that it may hear of."""

    def end(self) -> None:
        """Take away the hooks that it has put on tensors and optimizers."""


@dataclass(eq=False)
class Since:
    """What has happened to one optimizer since its last step.

    Attributes:
        had_block: Whether there was a block.
        had_gradients: Whether such a block gave any gradients.
        used: The gradients in the model at that step: if a later step finds one of these tensors, there was no new
            backward pass.
    """

    had_block: bool = False
    had_gradients: bool = False
    used: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def is_new(self, gradients: list[torch.Tensor]) -> bool:
        """Whether there are ``gradients`` that were not there at the last step."""
        return bool(gradients) and not self.was_used(gradients[0])

    def was_used(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` was there at the last step."""
        return any(_torch.tensor_of(used) is gradient for used in self.used)


class LastSteps(Rule):
    """Looks for nothing: it keeps the facts of :class:`Since`. It hears of a step after the rules that ask it."""

    def __init__(self) -> None:
        self._since: weakref.WeakKeyDictionary[AmpOptimizer, Since] = weakref.WeakKeyDictionary()

    def since(self, optimizer: AmpOptimizer) -> Since:
        """What has happened to ``optimizer`` since its last step."""
        return self._since.setdefault(optimizer, Since())

    def on_block_end(self, block: OpenBlock) -> None:
        """Note whose gradients ``block`` has given; gradients that it leaves to torch are taken for granted."""
        gave_gradients = block.has_new_grads is None or block.has_new_grads
        for optimizer in block.optimizers:
            since = self.since(optimizer)
            since.had_block = True
            since.had_gradients = since.had_gradients or gave_gradients

    def on_unscaled_by_script(self, optimizer: AmpOptimizer) -> None:
        """Note that a script has unscaled gradients of ``optimizer`` itself."""
        since = self.since(optimizer)
        since.had_block = True
        since.had_gradients = True

    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Begin anew."""
        self._since[optimizer] = Since(used=list(map(weakref.ref, gradients_in(optimizer))))


def gradients_in(optimizer: AmpOptimizer) -> list[torch.Tensor]:
    """The gradients in the model that belong to ``optimizer``."""
    return [leaf.grad for leaf in optimizer._amp_stash.leaves.tensors() if leaf.grad is not None]
