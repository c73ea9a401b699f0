"""Who owns gradients while they are multiplied by a scale: an open block, and what ``delay_unscale`` has left.

Unscaled gradients have no owner: they are the ``grad`` of a master or of a parameter, as in plain torch.
``gradient_rules`` says what each event does to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.scaler import LossScaler


class Overflow(NamedTuple):
    """Whether gradients are not finite.

    Attributes:
        scaler: The scaler of their loss; None for gradients that an earlier overflow may have left.
        flag: 0-dim float32 tensor on a device, not 0 if so.
    """

    scaler: LossScaler | None
    flag: torch.Tensor


@dataclass(eq=False)
class ScaledGradients:
    """Gradients in ``p.grad`` of the model's tensors, multiplied by a scale.

    Attributes:
        leaves: The tensors.
        scalers: The scalers of the losses that they stem from, the block's own first; each counts the pass when these
            are unscaled.
        scale: What they are multiplied by (0-dim float32); None where nothing is scaled.
        saved: Unscaled gradients from before, of leaves without a master: they come back when these are unscaled.
    """

    leaves: Leaves
    scalers: list[LossScaler]
    scale: torch.Tensor | None = None
    saved: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def overlaps(self, leaves: Leaves) -> bool:
        """Whether one of ``leaves`` is among its own."""
        return not self.leaves.ids().isdisjoint(leaves.ids())


@dataclass(eq=False)
class Block(ScaledGradients):
    """What an open ``scale_loss`` block owns.

    Attributes:
        optimizers: The optimizers that it was opened for; their tensors may have gone to others since.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        took_pending: Whether there were pending gradients in its leaves, which its own are added to.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    is_plain: bool = False
    took_pending: bool = False


@dataclass(eq=False)
class Pending(ScaledGradients):
    """What a block with ``delay_unscale``, or in DDP's ``no_sync``, has left to a later block or to the step.

    FSDP2's gradients of ``set_requires_gradient_sync(False)`` are pending too, though they are not in ``p.grad``.

    Attributes:
        is_unsynced: Whether a wrapper of the model has yet to average them over processes.
    """

    is_unsynced: bool = False


def pending_in(leaves: Leaves) -> list[Pending]:
    """The pending gradients that ``leaves`` have, or some of them."""
    if not state.pending:
        return []
    return [pending for pending in state.pending if pending.overlaps(leaves)]


def open_block_of(leaves: Leaves) -> Block | None:
    """The open block that gives gradients to any of ``leaves``, plain ones last."""
    if not state.open_blocks:
        return None
    blocks = [block for block in state.open_blocks if block.overlaps(leaves)]
    blocks.sort(key=lambda block: block.is_plain)
    return blocks[0] if blocks else None
