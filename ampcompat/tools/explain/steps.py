"""The steps of one optimizer: which were lost, at which loss scales, and when a skip is no normal back-off."""

from __future__ import annotations

import weakref
from collections import deque
from typing import cast

from ampcompat.tools.core import LossScaler, Optimizer, numbers_of, scale_and_passes
from ampcompat.tools.explain.birth import Birth
from ampcompat.tools.explain.weights import Weights, gradients_of
from ampcompat.tools.tensors import is_finite, largest

#: The last steps that are looked at, and how many of them a back-off may skip. A scale that begins at 65536 is below 1
#: after 17 skips.
WINDOW, MOST_SKIPS = 20, 10


class Block:
    """A ``scale_loss`` block: its scaler, and the loss scale that it began with."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._numbers = numbers_of(scaler)  # on their way to the host

    @property
    def scale(self) -> float:
        """The loss scale."""
        scale, _ = scale_and_passes(self._numbers)
        return scale


class Steps:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.seen = 0  # how many there were
        self.skips = 0  # how many in a row were skipped, up to the last
        self.lost = ""  # what of the step to come is known not to be finite: "loss" or "gradients"
        self.is_told = False  # whether that was told
        self.blocks: dict[LossScaler, Block] = {}  # the last of each scaler, since the step before
        self.weights = Weights(optimizer)
        self.steps_of_zeros = 0  # how many in a row, up to the last that was made, had gradients of 0 alone
        self.underflow = ""  # gradients of 0 in the last that was made, in words
        self.had_old_gradients = False  # gradients that were not finite, before the first block since the step before
        self.held: Birth | None = None  # of gradients that a lower loss scale may hold
        self._last: deque[bool] = deque(maxlen=WINDOW)  # whether they were skipped
        self._has_stepped = True
        self._made_at: dict[LossScaler, float] = {}  # the highest scales of steps that were made

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which lives while its steps are asked."""
        return cast(Optimizer, self._optimizer())

    def begin_block(self, block: Block) -> bool:
        """Note a block; look at weights that something other than a step has written, and at gradients after a skip.

        Returns:
            Whether it is the first since the step before.
        """
        is_first = self._has_stepped
        if is_first:
            self._has_stepped = False
            self.blocks = {}
            self.had_old_gradients = self.skips > 0 and not all(map(is_finite, gradients_of(self.optimizer)))
        self.blocks.setdefault(block.scaler, block)  # an overflow halves the scale of the next
        if self.lost and not any(map(largest, gradients_of(self.optimizer))):
            self.lost = ""  # the script has dropped that batch, and cleared its gradients
        self.weights.look_at_written(self.optimizer)
        return is_first

    def end(self, is_skipped: bool) -> None:
        """Note that a step was made or skipped."""
        self.seen += 1
        self.skips = self.skips + 1 if is_skipped else 0
        self._last.append(is_skipped)
        self._has_stepped = True
        if not is_skipped and not self.lost:
            self.held = None
            for scaler, block in self.blocks.items():
                self._made_at[scaler] = max(block.scale, self._made_at.get(scaler, 0.0))

    def has_been_made_at(self, block: Block) -> bool:
        """Whether a step was made at the loss scale of ``block``, or at a higher one."""
        return block.scale <= self._made_at.get(block.scaler, 0.0)

    def overflows_persist(self, scale: float) -> bool:
        """Whether overflows persist as the loss scale falls; ``scale`` is what it has come down to."""
        return scale < 1 or (len(self._last) == WINDOW and sum(self._last) > MOST_SKIPS)

    @property
    def often(self) -> str:
        """As in "11 of the last 14 steps"."""
        return f"{sum(self._last)} of the last {len(self._last)} steps"
