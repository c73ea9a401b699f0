"""Notice mistakes with the gradients of a block: of another loss, of no block, of another optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ampcompat.amp.half.masters import Master
from ampcompat.amp.misuse.rule import LastSteps, Rule, Since
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import OpenBlock, is_in_block
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, optimizer_index


class UnscaledLoss(Rule):
    """A block whose gradients do not come from the scaled loss."""

    def __init__(self) -> None:
        self._backward_passes: dict[OpenBlock, list[torch.Tensor]] = {}  # the gradients of the scaled loss

    def on_scaled_loss(self, block: OpenBlock, scaled: torch.Tensor) -> None:
        """Follow the backward passes of the ``scaled`` loss of ``block``."""
        if scaled.requires_grad:
            passes = self._backward_passes[block] = []
            scaled.register_hook(passes.append)  # type: ignore[no-untyped-call]

    def on_block_end(self, block: OpenBlock) -> None:
        """Warn where ``block`` has gradients, and its loss none."""
        passes = self._backward_passes.pop(block, None)
        got_none = passes is not None and not passes
        if block.has_new_grads and got_none:
            warn_of("unscaled loss in a block")

    def on_block_undone(self, block: OpenBlock) -> None:
        """Forget ``block``."""
        self._backward_passes.pop(block, None)


class PlainGradients(Rule):
    """Half weights with gradients that no block gave: a block drops them."""

    def __init__(self, steps: LastSteps) -> None:
        self._steps = steps

    def on_block(self, block: OpenBlock) -> None:
        """Look at the gradients that are there before ``block`` saves them."""
        if block.is_plain:
            return
        for optimizer in block.optimizers:
            since = self._steps.since(optimizer)
            if not since.had_block:
                _look_at_plain_gradients(optimizer._amp_stash.leaves.masters, since)


def _look_at_plain_gradients(masters: Sequence[Master], since: Since) -> None:
    """Warn of gradients of half weights that no block gave; the first gradient stands for all."""
    for master in masters:
        gradient = master.half.grad
        if gradient is None:
            continue
        is_of_no_block = not master.grad_shown and not since.was_used(gradient)
        if is_of_no_block and gradient.any():  # zeros are cleared gradients
            warn_of("plain gradients dropped")
        return


class _Bystander(NamedTuple):
    """A gradient that waits for the step of another optimizer while a block is open, and its version before."""

    optimizer: AmpOptimizer
    param: torch.Tensor
    grad: torch.Tensor
    version: int

    def is_there(self) -> bool:
        """Whether the gradient was not cleared or replaced."""
        return self.param.grad is self.grad


class ForeignGradients(Rule):
    """A step with a gradient that the block of another optimizer has added to."""

    def __init__(self, steps: LastSteps) -> None:
        self._steps = steps
        self._bystanders: dict[OpenBlock, list[_Bystander]] = {}
        self._added_to: weakref.WeakKeyDictionary[AmpOptimizer, _Bystander] = weakref.WeakKeyDictionary()

    def on_block(self, block: OpenBlock) -> None:
        """Look before the block saves gradients of its optimizers."""
        if not block.is_plain:
            for optimizer in block.optimizers:
                self.before_step(optimizer)

    def on_scaled_loss(self, block: OpenBlock, scaled: torch.Tensor) -> None:
        """Remember one gradient of each other optimizer that has yet to step with it."""
        if block.scaler.is_one:
            return
        found = self._bystanders[block] = []
        for other in optimizer_index.listed():
            leaves = other._amp_stash.leaves
            waits = other not in block.optimizers and self._steps.since(other).had_gradients
            if not waits or block.overlaps(leaves) or is_in_block(other):
                continue
            param = next((param for param in leaves.masterless if param.grad is not None), None)
            if param is not None and param.grad is not None:
                found.append(_Bystander(other, param, param.grad, param.grad._version))

    def on_block_end(self, block: OpenBlock) -> None:
        """Note where ``block`` has added to them."""
        for bystander in self._bystanders.pop(block, []):
            if bystander.is_there() and bystander.grad._version != bystander.version:
                self._added_to[bystander.optimizer] = bystander._replace(version=bystander.grad._version)

    on_block_undone = on_block_end

    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Warn where such a gradient of ``optimizer`` is still there, as it was left."""
        left = self._added_to.pop(optimizer, None)
        if left is not None and left.is_there() and left.grad._version == left.version:
            warn_of("scaled gradients of another block")
