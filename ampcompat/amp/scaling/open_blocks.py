"""Which ``scale_loss`` blocks are open, and what each owns.

While a block is open, the gradients of its tensors are multiplied by its scale. Outside of blocks gradients are
unscaled: they are the ``grad`` of a master or of a parameter, as in plain torch. The head of ``block`` says what each
event does to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat._state import Part, state
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, Leaves, OptimizerState
from ampcompat.amp.scaling.scaler import LossScaler


@dataclass(eq=False)
class ScriptsPart:
    """What a block leaves to a script's own ``_post_amp_backward``.

    Attributes:
        leaves: Whose gradients are to be unscaled.
        saved_grads_taken: Whether it has asked for saved gradients, to add them itself.
    """

    leaves: Leaves
    saved_grads_taken: bool = False


@dataclass(eq=False)
class OpenBlock:
    """What an open ``scale_loss`` block owns; ``block.Block`` has its phases.

    Attributes:
        scaler: The scaler of its loss.
        optimizers: The optimizers that it was opened for; their tensors may have gone to others since.
        stashes: What amp keeps with each of them; looked up when it opens, as the leaves are.
        leaves: The tensors that its backward pass gives gradients to.
        scale: What their gradients are multiplied by (0-dim float32); None where nothing is scaled.
        saved: Unscaled gradients from before, of leaves without a master: they come back when it ends.
        brought: The leaves whose older gradients it has put back into ``p.grad``, scaled: they wait to be averaged.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        has_new_grads: Whether the backward pass gave any gradients; None before the end, and in a plain block.
        scripts_part: What it leaves to a script's own ``_post_amp_backward``, while it calls that.
    """

    scaler: LossScaler
    optimizers: list[AmpOptimizer]
    stashes: list[OptimizerState] = field(init=False)
    leaves: Leaves = field(init=False)
    scale: torch.Tensor | None = field(init=False, default=None)
    saved: dict[torch.Tensor, torch.Tensor] = field(init=False, default_factory=dict)
    brought: Leaves | None = field(init=False, default=None)
    is_plain: bool = field(init=False, default=False)
    has_new_grads: bool | None = field(init=False, default=None)
    scripts_part: ScriptsPart | None = field(init=False, default=None)

    def overlaps(self, leaves: Leaves) -> bool:
        """Whether one of ``leaves`` is among its own."""
        return not self.leaves.ids().isdisjoint(leaves.ids())


@dataclass(eq=False)
class BlockState(Part):
    """The blocks of this process.

    Attributes:
        open_blocks: The ``scale_loss`` blocks that are open.
    """

    open_blocks: list[OpenBlock] = field(default_factory=list)


block_state = state.add(BlockState())


def open_block_of(leaves: Leaves) -> OpenBlock | None:
    """The open block that gives gradients to any of ``leaves``, plain ones last."""
    if not block_state.open_blocks:
        return None
    blocks = [block for block in block_state.open_blocks if block.overlaps(leaves)]
    return min(blocks, key=lambda block: block.is_plain, default=None)


def is_in_block(optimizer: AmpOptimizer) -> bool:
    """Whether a block is open that gives gradients to tensors of ``optimizer``."""
    return open_block_of(optimizer._amp_stash.leaves) is not None


def leaves_of(optimizers: list[AmpOptimizer]) -> Leaves:
    """The leaves of ``optimizers``, each once."""
    if len(optimizers) == 1:
        return optimizers[0]._amp_stash.leaves
    every = [optimizer._amp_stash.leaves for optimizer in optimizers]
    masters = {id(master): master for leaves in every for master in leaves.masters}
    masterless = {id(param): param for leaves in every for param in leaves.masterless}
    return Leaves(list(masters.values()), list(masterless.values()))
