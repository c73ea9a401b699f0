"""The tensors that backward passes give gradients to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master


@dataclass(eq=False, slots=True)
class Leaves:
    """What one or several optimizers train, as the model holds it: each tensor once.

    Attributes:
        masters: Masters of the half tensors.
        direct: The tensors without a master, which optimizers step themselves.
    """

    masters: list[Master] = field(default_factory=list)
    direct: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """The model's tensors."""
        return [*[master.half for master in self.masters], *self.direct]

    def ids(self) -> set[int]:
        """The ids of the model's tensors."""
        return set(map(id, self.tensors()))

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that a step uses: of masters, and of tensors without one."""
        stepped = [*[master.value for master in self.masters], *self.direct]
        return [tensor.grad for tensor in stepped if tensor.grad is not None]

    def part(self, ids: set[int]) -> Leaves:
        """The leaves among these whose ids are in ``ids``."""
        return Leaves(
            [master for master in self.masters if id(master.half) in ids],
            [param for param in self.direct if id(param) in ids],
        )


def leaves_of(optimizers: Iterable[Optimizer]) -> Leaves:
    """The leaves of ``optimizers``, each once."""
    every = [optimizer._amp_stash.leaves for optimizer in optimizers]
    masters = {id(master): master for leaves in every for master in leaves.masters}
    direct = {id(param): param for leaves in every for param in leaves.direct}
    return Leaves(list(masters.values()), list(direct.values()))
