"""Follow the steps of one optimizer: which were lost, at which loss scale, and what they have written."""

from __future__ import annotations

import math
from collections import deque

from ampcompat.tools.core import LossScaler, Optimizer, numbers_of, scale_and_passes
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.lost import NORMAL, WINDOW, LostStep, end_fall
from ampcompat.tools.explain.underflow import Underflow, underflow
from ampcompat.tools.explain.weights import Weights, gradients_of
from ampcompat.tools.explain.written import first_written
from ampcompat.tools.tensors import largest


class BlockScale:
    """The loss scale of one block of ``scale_loss``, and its scaler."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._numbers = numbers_of(scaler)  # on their way to the host

    @property
    def scale(self) -> float:
        """The loss scale that it began with."""
        scale, _ = scale_and_passes(self._numbers)
        return scale


class OptimizerSteps:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = 0  # how many there were
        self.made = 0  # the number of the last that was not skipped
        self.lost: LostStep | None = None  # the step to come, if that is known to be lost
        self.last: deque[LostStep | None] = deque(maxlen=WINDOW)  # None for a step that was not lost
        self.held: Fault | None = None  # the explanation of gradients that may be gone at a lower loss scale
        self.block: BlockScale | None = None  # the last
        self.last_blocks: dict[LossScaler, BlockScale] = {}  # since the step before
        self.weights = Weights(optimizer)
        self.zeros = 0  # how many steps in a row, up to the last that was made, had gradients of 0 alone
        self.largest_of_block = 0.0  # the largest gradient when the last block ended, looked at after such a step
        self._has_stepped = False
        self._made_at: dict[LossScaler, float] = {}  # the highest scales of steps that were made
        self._scales: dict[LossScaler, tuple[float, int]] = {}  # and the step that each came with

    def begin_block(self, optimizer: Optimizer, block: BlockScale) -> None:
        """Note a block, and look at weights that something other than a step has written."""
        if self._has_stepped:
            self._has_stepped = False
            self.last_blocks = {}
        self.block = self.last_blocks[block.scaler] = block
        if self.lost is not None and not any(map(largest, gradients_of(optimizer))):
            self.lost = None  # the script has dropped that batch, and cleared its gradients
        self.weights.look_at_written(optimizer)

    def end_block(self, optimizer: Optimizer) -> None:
        """Look at the gradients, if those of the latest step were all 0: has the script made them so after a block?"""
        self.largest_of_block = 0.0
        if self.zeros:
            self.largest_of_block = max(map(largest, gradients_of(optimizer)), default=0.0)

    def end(self, skipped: bool) -> None:
        """Note that a step was made or skipped, and the scales of its blocks."""
        self.seen += 1
        self._has_stepped = True
        if not skipped:
            end_fall(self.last, NORMAL)
        self.last.append(self.lost)
        for scaler, block in self.last_blocks.items():
            known, _ = self._scales.get(scaler, (math.nan, 0))
            if block.scale != known:
                self._scales[scaler] = block.scale, self.seen
            if not skipped:
                self._made_at[scaler] = max(block.scale, self._made_at.get(scaler, 0.0))

    @property
    def skips(self) -> int:
        """How many steps in a row were skipped, up to the last."""
        return self.seen - self.made

    def has_been_made_at(self, scaler: LossScaler) -> bool:
        """Whether a step was made at the loss scale of the last block of ``scaler``, or at a higher one."""
        block = self.last_blocks.get(scaler)
        return block is not None and block.scale <= self._made_at.get(scaler, 0.0)

    def after(self, optimizer: Optimizer) -> tuple[Fault | None, Underflow | None]:
        """Look at what a step that was made has written, and at its gradients.

        Returns:
            The fault of a weight or state that it has left not finite, and gradients that were too small.
        """
        self.made = self.seen
        were_finite = self.weights.are_finite
        largest_grad = self.weights.look_after_step(optimizer)
        is_new = were_finite and not self.weights.are_finite and self.lost is None  # otherwise the fault was told
        self.zeros = self.zeros + 1 if largest_grad == 0 else 0
        too_small = None
        if largest_grad is not None and self._scales:
            scale, since = min(self._scales.values())
            zeros = 0 if self.zeros >= WINDOW and self.weights.history.is_loss_zero() else self.zeros
            too_small = underflow(optimizer, self.seen, largest_grad, scale, since, self.largest_of_block, zeros)
        written = first_written(optimizer, self.seen, self.weights.history) if is_new else None
        return written, too_small
