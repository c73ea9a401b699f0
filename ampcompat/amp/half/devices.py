"""Which models are under amp, and on which devices. Ambient casts follow a model to another device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._state import Part, state
from ampcompat.amp.casts.ambience import install_casting, set_ambient
from ampcompat.amp.casts.contexts import cast_state
from ampcompat.amp.casts.trees import tensors_in
from ampcompat.amp.half.record import own_tensors


@dataclass(eq=False)
class ModelIndex(Part):
    """The models of the process.

    Attributes:
        live: Models that ``initialize`` was given, as long as they are alive; copies of them are not listed.
    """

    live: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)


model_index = state.add(ModelIndex())


@_torch.eager
def device_types_of(models: Iterable[torch.nn.Module]) -> set[str]:
    """Device types that hold parameters or buffers of ``models``."""
    modules = itertools.chain.from_iterable(map(torch.nn.Module.modules, models))  # scripts override ``parameters()``
    return {tensor.device.type for module in modules for _, tensor in own_tensors(module)}


@_torch.eager
def device_type_of(model: torch.nn.Module, args: tuple[object, ...] = ()) -> str:
    """Return the device type of ``model``; a model without tensors computes where its arguments are."""
    for module in model.modules():  # not ``model.parameters()``, which is slower
        for param in module._parameters.values():
            if param is not None:
                return str(param.device.type)
    for buffer in model.buffers():
        return str(buffer.device.type)
    device_types = [tensor.device.type for tensor in tensors_in(args)] or cast_state.device_types
    return device_types[0] if device_types else "cpu"


@_torch.eager
def move_casts_to(device_type: str) -> None:
    """Move the ambient casts along with models that were moved to ``device_type`` since ``initialize``, if any were."""
    if cast_state.original is None or device_type in cast_state.device_types:
        return
    was_moved = any(device_type_of(model) == device_type for model in model_index.live)  # not a copy, elsewhere
    if was_moved and device_type in _torch.autocast_device_types():
        wanted = device_types_of(model_index.live) & set(_torch.autocast_device_types())
        install_casting(wanted)
        set_ambient(wanted)
