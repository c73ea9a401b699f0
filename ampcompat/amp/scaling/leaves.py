"""What optimizers train: the model's tensors, with their masters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat.amp.half.masters import Master


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

    def clear_gradients(self) -> None:
        """Clear all gradients, of the model and of masters: optimizers step without what is None."""
        for master in self.masters:
            master.half.grad = None
            master.clear_gradient()
        for param in self.masterless:
            param.grad = None
