"""The record that a module carries while its own parameters and buffers are half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from ampcompat.amp.half.masters import Master

#: Where the record is: ``module.__dict__[ATTRIBUTE]``, so that deepcopy and pickle take it along.
ATTRIBUTE = "_amp_half_weights"


@dataclass(eq=False, slots=True)
class HalfWeights:
    """What amp keeps at a module whose own floating tensors it has cast to half.

    Attributes:
        dtype: The half dtype.
        has_masters: Whether its half tensors have float32 masters (O2, O5), or none (O3).
        masters: Those that were made so far, by the name of their parameter or buffer.
        hooks: Handles of the hooks on saving and loading; empty until :func:`ampcompat.amp.half.weights.hook`.
    """

    dtype: torch.dtype
    has_masters: bool
    masters: dict[str, Master] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)


def half_weights(module: torch.nn.Module) -> HalfWeights | None:
    """Return the record of ``module``; None where its own tensors are not half by amp."""
    return module.__dict__.get(ATTRIBUTE)


def ensure_half_weights(module: torch.nn.Module, dtype: torch.dtype, has_masters: bool) -> HalfWeights:
    """Return the record of ``module``, made if missing, and set to ``dtype`` and ``has_masters``."""
    record: HalfWeights | None = module.__dict__.get(ATTRIBUTE)
    if record is None:
        record = HalfWeights(dtype, has_masters)
        module.__dict__[ATTRIBUTE] = record
    record.dtype = dtype
    record.has_masters = has_masters
    return record


def drop_half_weights(module: torch.nn.Module) -> None:
    """Remove the record of ``module``, whose tensors are float32 again, and its hooks on saving and loading."""
    record: HalfWeights | None = module.__dict__.pop(ATTRIBUTE, None)
    if record is not None:
        for handle in record.hooks:
            handle.remove()


def masters_by_name(module: torch.nn.Module) -> dict[str, Master]:
    """Return the masters of ``module``'s own tensors; an empty dict where there are none."""
    record: HalfWeights | None = module.__dict__.get(ATTRIBUTE)
    return {} if record is None else record.masters
