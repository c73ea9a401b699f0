"""Who owns gradients while they are multiplied by a scale: an open block, and what ``delay_unscale`` has left.

Unscaled gradients have no owner: they are the ``grad`` of a master or of a parameter, as in plain torch. The head of
``block`` says what each event does to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.loss_scale import UncountedPasses
from ampcompat.amp.scaling.scaler import LossScaler


class Overflow(NamedTuple):
    """Whether gradients that were unscaled are not finite.

    Attributes:
        scaler: The scaler of their loss.
        flag: 0-dim float32 tensor on a device, not 0 if so.
        uncounted: The passes that theirs belongs to, if it has left the scale alone.
    """

    scaler: LossScaler
    flag: torch.Tensor
    uncounted: UncountedPasses | None

    @property
    def is_decided(self) -> bool:
        """Whether the script itself decides about the step of these gradients."""
        return self.uncounted is not None and self.uncounted.are_decided


@dataclass(eq=False)
class ScaledGradients:
    """Gradients of the model's tensors, multiplied by a scale.

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
class OpenBlock(ScaledGradients):
    """What an open ``scale_loss`` block owns; ``block.Block`` has its phases.

    Attributes:
        optimizers: The optimizers that it was opened for; their tensors may have gone to others since.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        took_pending: Whether there were pending gradients in its leaves, which its own are added to.
        has_new_grads: Whether the backward pass gave any gradients; None before the end, and where they stay scaled.
        part: The leaves that ``_post_amp_backward`` unscales while the block calls a script's own; None: all.
        saved_grads_taken: Whether a script's own ``_post_amp_backward`` has asked for saved gradients, to add them
            itself.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    is_plain: bool = False
    took_pending: bool = False
    has_new_grads: bool | None = None
    part: Leaves | None = None
    saved_grads_taken: bool = False


@dataclass(eq=False)
class Pending(ScaledGradients):
    """What a block with ``delay_unscale``, or in DDP's ``no_sync``, has left to a later block or to the step.

    They are in ``p.grad``, but for FSDP2's gradients of ``set_requires_gradient_sync(False)``, which it keeps itself.

    Attributes:
        is_unreduced: Whether a wrapper of the model has yet to average them over processes.
    """

    is_unreduced: bool = False


def pending_in(leaves: Leaves) -> list[Pending]:
    """The pending gradients that ``leaves`` have, or some of them."""
    if not state.pending:
        return []
    return [pending for pending in state.pending if pending.overlaps(leaves)]


def open_block_of(leaves: Leaves) -> OpenBlock | None:
    """The open block that gives gradients to any of ``leaves``, plain ones last."""
    if not state.open_blocks:
        return None
    blocks = [block for block in state.open_blocks if block.overlaps(leaves)]
    blocks.sort(key=lambda block: block.is_plain)
    return blocks[0] if blocks else None
