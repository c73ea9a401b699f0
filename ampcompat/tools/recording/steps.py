"""The record of one optimizer step. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """One loss scaler after a step.

    Attributes:
        loss_id: Which of the ``num_losses`` scalers.
        scale: What the next loss is multiplied by.
        clean_passes: Backward passes without an overflow since the scale last moved.
    """

    loss_id: int
    scale: float
    clean_passes: int


@dataclass(frozen=True)
class Step:
    """One optimizer step. ``losses`` are read where a recorder was asked to.

    Attributes:
        step: Its number, from 1, over all optimizers since the recorder began.
        step_of_session: Its number over the optimizers of its session.
        skipped: Whether it was skipped for an overflow.
        scales: The loss scalers of the ``scale_loss`` blocks since the optimizer's last step, after this one.
        losses: The loss of each of these blocks, unscaled (mean, if not scalar).
    """

    step: int
    step_of_session: int
    skipped: bool
    scales: Sequence[Scale] = ()
    losses: Sequence[float] = ()

    @property
    def loss(self) -> float | None:
        """The sum of the losses; None without a block."""
        return sum(self.losses) if self.losses else None
