"""Which devices models are on, and ambient casts that follow a model to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.casts.ambience import install_casting, set_ambient
from ampcompat.amp.casts.trees import tensors_in
from ampcompat.amp.half.record import own_tensors


@_torch.eager
def device_types_of(models: Iterable[torch.nn.Module]) -> set[str]:
    """Device types that hold parameters or buffers of ``models``."""
    modules = itertools.chain.from_iterable(map(torch.nn.Module.modules, models))  # scripts override ``parameters()``
    return {tensor.device.type for module in modules for _, tensor in own_tensors(module)}


@_torch.eager
def device_type_of(model: torch.nn.Module, args: tuple[object, ...] = ()) -> str:
    """Return the device type of ``model``. A model moved since ``initialize`` moves the ambient casts along.

    A model without tensors computes where its arguments are.
    """
    ambience = state.casts
    tensor = _first_tensor(model)
    if tensor is None:
        device_types = [tensor.device.type for tensor in tensors_in(args)] or ambience.device_types
        return device_types[0] if device_types else "cpu"
    device_type = str(tensor.device.type)
    was_moved = device_type not in ambience.device_types
    if was_moved and ambience.original is not None:
        wanted = device_types_of(state.models.live) & set(_torch.autocast_device_types())
        install_casting(wanted)
        set_ambient(wanted)
    return device_type


def _first_tensor(model: torch.nn.Module) -> torch.Tensor | None:
    """Return a parameter of ``model``, or a buffer of one that has none; None if it has neither."""
    for module in model.modules():  # not ``model.parameters()``, which is slower
        for param in module._parameters.values():
            if param is not None:
                return param
    return next(model.buffers(), None)
