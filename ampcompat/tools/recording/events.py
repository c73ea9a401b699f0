"""The lines of a journal as the command reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        step: Its number in the run, from 1, over all optimizers.
        optimizer: Which optimizer, from 0, in the order of their first steps.
        losses: The loss of each ``scale_loss`` block since the optimizer's last step, unscaled (mean, if not scalar).
        loss: Their sum; None without a block.
        scale: The smallest loss scale of these blocks; None without a block.
        grad_norm: 2-norm of the optimizer's unscaled gradients after its last block, before any clipping.
        skipped: Whether the step was skipped for an overflow.
        seconds: Since the step before, less what recording took; None for the first.
        memory: Largest memory so far in bytes: allocated on the GPU where one is used, else that of the process.
    """

    step: int
    optimizer: int
    losses: list[float]
    loss: float | None
    scale: float | None
    grad_norm: float | None
    skipped: bool
    seconds: float | None
    memory: int | None


class End(TypedDict, total=False):
    """Tell how the script ended, and how far it came in its use of amp; no other line holds any of it.

    Attributes:
        error: What ended it, in one line; None at a normal end.
        initialized: Whether it called ``initialize``.
        enabled: Whether that was enabled.
        blocks: ``scale_loss`` blocks.
        children: Whether it started other processes.
    """

    error: str | None
    initialized: bool
    enabled: bool
    blocks: int
    children: bool
