"""Which tensors have gradients, and what is known of these outside of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.loss_scale import DelayedPasses
from ampcompat.amp.scaling.scaler import LossScaler


@dataclass(eq=False, slots=True)
class Leaves:
    """What one or several optimizers train, as the model holds it: each tensor once.

    Attributes:
        masters: Masters of the half tensors.
        masterless: The tensors without a master, which optimizers step themselves.
    """

    masters: list[Master] = field(default_factory=list)
    masterless: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """The model's tensors."""
        return [*[master.half for master in self.masters], *self.masterless]

    def ids(self) -> set[int]:
        """The ids of the model's tensors."""
        return set(map(id, self.tensors()))

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that a step uses: of masters, and of tensors without one."""
        stepped = [*[master.value for master in self.masters], *self.masterless]
        return [tensor.grad for tensor in stepped if tensor.grad is not None]

    def part(self, ids: set[int]) -> Leaves:
        """The leaves among these whose ids are in ``ids``."""
        return Leaves(
            [master for master in self.masters if id(master.half) in ids],
            [param for param in self.masterless if id(param) in ids],
        )


# -- what is known of gradients ----------------------------------------------------------------------------------------
class Unreduced(NamedTuple):
    """What blocks have left whose gradients are those of this process alone, as in DDP's ``no_sync``.

    Attributes:
        scalers: The scalers of their losses, which have yet to hear of an overflow, when all processes can find it.
        scale: What the gradients that a wrapper keeps to itself are multiplied by (0-dim float32), as ``fully_shard``
            keeps those of ``set_requires_gradient_sync(False)``; None where nothing is scaled.
    """

    scalers: list[LossScaler]
    scale: torch.Tensor | None


class Overflow(NamedTuple):
    """Whether gradients that were unscaled are not finite.

    Attributes:
        scaler: The scaler of their loss.
        flag: 0-dim float32 tensor on a device, not 0 if so.
        delayed: Where their block had ``delay_overflow_check``: the passes that its own was delayed with. Else None.
    """

    scaler: LossScaler
    flag: torch.Tensor
    delayed: DelayedPasses | None

    @property
    def is_decided(self) -> bool:
        """Whether the script itself decides about the step of these gradients: it has called ``update_scale()``."""
        return self.delayed is not None and self.delayed.are_decided
