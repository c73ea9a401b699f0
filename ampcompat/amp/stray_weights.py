"""Weights of another dtype than amp gave them, inside one forward of a half model.

``torch.func.functional_call`` with float32 tensors (a ``state_dict()``, fast weights of a meta-learner), a parameter
that was replaced (``model.head.weight = nn.Parameter(...)``): the forward computes with them cast, differentiably.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ampcompat._state import state


class Slot(NamedTuple):
    """A place of a module's tensor, and the dtype that amp gave it."""

    home: dict[str, Any]
    name: str
    dtype: torch.dtype


def strays(model: torch.nn.Module) -> list[Slot]:
    """Where ``model`` holds a parameter of another dtype than its module was cast to.

    Buffers only where there are such parameters (``functional_call`` with a whole state dict): a forward may well give
    a buffer of its own another dtype.
    """
    params, buffers = _slots(model)
    found = _of_other_dtype(params)
    return found and found + _of_other_dtype(buffers)


@contextmanager
def cast_for_forward(found: list[Slot]) -> Iterator[None]:
    """Cast the tensors in ``found`` for the time of one forward."""
    swapped = []
    for slot in found:
        tensor = slot.home[slot.name]
        cast: torch.Tensor = tensor.to(slot.dtype)
        slot.home[slot.name] = cast
        swapped.append((slot, tensor, cast, cast._version))
    try:
        yield
    finally:
        for slot, tensor, cast, version in swapped:
            if slot.home.get(slot.name) is cast:
                slot.home[slot.name] = tensor
                if not isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
                    _take_back(tensor, cast)
                elif cast._version != version:
                    with torch.no_grad():
                        tensor.copy_(cast)


@torch.no_grad()
def _take_back(buffer: torch.Tensor, cast: torch.Tensor) -> None:
    """Running statistics: batch norm writes them and moves no version counter. No host sync."""
    buffer.copy_(torch.where(buffer.to(cast.dtype) == cast, buffer, cast.to(buffer.dtype)))


def _of_other_dtype(slots: list[Slot]) -> list[Slot]:
    # Inline: every forward looks at every weight.
    return [
        Slot(home, name, dtype)
        for home, name, dtype in slots
        if (tensor := home.get(name)) is not None and tensor.dtype is not dtype and tensor.is_floating_point()
    ]


def _slots(model: torch.nn.Module) -> tuple[list[Slot], list[Slot]]:
    """The places of ``model``'s parameters and buffers in modules that amp cast, looked up once."""
    cache: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[Slot], list[Slot]]]
    cache = state.room("half slots", weakref.WeakKeyDictionary)
    found = cache.get(model)
    if found is None:
        cast = [module for module in model.modules() if "_amp_half" in module.__dict__]
        found = cache[model] = (
            [slot for module in cast for slot in _slots_in(module, module._parameters)],
            [slot for module in cast for slot in _slots_in(module, module._buffers)],
        )
    return found


def _slots_in(module: torch.nn.Module, home: dict[str, Any]) -> list[Slot]:
    half = module.__dict__["_amp_half"][0]
    return [Slot(home, name, half) for name, t in home.items() if t is not None and t.is_floating_point()]


def forget(model: torch.nn.Module) -> None:
    """Look the places up again (the model was cast anew)."""
    state.room("half slots", weakref.WeakKeyDictionary).pop(model, None)
