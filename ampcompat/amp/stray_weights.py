"""Weights of another dtype than amp gave them, inside one forward of a half model.

``torch.func.functional_call`` with float32 tensors (a ``state_dict()``, fast weights of a meta-learner), a parameter
that was replaced (``model.head.weight = nn.Parameter(...)``): the forward computes with them cast, differentiably.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampcompat._state import state

Slot = tuple[dict[str, Any], str, torch.dtype]


def strays(model: torch.nn.Module) -> list[Slot]:
    """Where ``model`` holds a floating tensor of another dtype than its module was cast to."""
    return [slot for slot in _slots(model) if _is_stray(slot[0].get(slot[1]), slot[2])]


@contextmanager
def cast_for_forward(found: list[Slot]) -> Iterator[None]:
    """Cast the tensors in ``found`` for the time of one forward."""
    kept = [(home, name, home[name]) for home, name, _ in found]
    for home, name, dtype in found:
        home[name] = home[name].to(dtype)
    try:
        yield
    finally:
        for home, name, tensor in kept:
            home[name] = tensor


def _is_stray(tensor: torch.Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.dtype is not dtype and tensor.is_floating_point()


def _slots(model: torch.nn.Module) -> list[Slot]:
    """The places of ``model``'s parameters in modules that amp cast, looked up once."""
    cache: weakref.WeakKeyDictionary[torch.nn.Module, list[Slot]]
    cache = state.room("half slots", weakref.WeakKeyDictionary)
    found = cache.get(model)
    if found is None:
        found = cache[model] = [
            (module._parameters, name, module.__dict__["_amp_half"][0])
            for module in model.modules()
            if "_amp_half" in module.__dict__
            for name, param in module._parameters.items()
            if param is not None and param.is_floating_point()
        ]
    return found


def forget(model: torch.nn.Module) -> None:
    """Look the places up again (the model was cast anew)."""
    state.room("half slots", weakref.WeakKeyDictionary).pop(model, None)
