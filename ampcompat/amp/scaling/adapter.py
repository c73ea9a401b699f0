"""What wrappers of models do with gradients, as far as blocks and steps must know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ampcompat._state import Part, state


@dataclass(eq=False)
class AdapterState(Part):
    """Wrappers of models in this process.

    Attributes:
        adapters: What blocks and steps must know of them, for each kind of wrapper in use.
    """

    adapters: list[Adapter] = field(default_factory=list)


adapter_state = state.add(AdapterState())


def use(kind: type[Adapter]) -> None:
    """Make blocks and steps ask an adapter of ``kind``, from now on."""
    if not any(isinstance(adapter, kind) for adapter in adapter_state.adapters):
        adapter_state.adapters.append(kind())


class Adapter:
    """One kind of wrapper; this base does nothing.

    ``ampcompat.amp.adapters`` has a subclass for DDP and one for ``fully_shard``. ``adapter_state.adapters`` has those
    in use (:func:`use`). Where there is any, gradients are looked at by their local parts.
    """

    def defers_reduction(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of any of ``leaves`` are those of this rank alone, as in ``no_sync``."""
        return False

    def kept_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of ``leaves`` that the wrapper keeps to itself until a later backward pass."""
        return []

    def clear_kept_gradients(self, leaves: Sequence[torch.Tensor]) -> None:
        """Clear what :meth:`kept_gradients` returns."""

    def combined_flag(self, flag: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Combine ``flag`` with those of all ranks that hold shards of ``tensors``; all of them must call it.

        No host sync.

        Args:
            flag: Whether this rank has found an inf or NaN (0-dim float32); None where it has looked at nothing.
            tensors: Leaves or their gradients.
        """
        return flag
