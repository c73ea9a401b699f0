"""Looking at tensors: finding them in nested structures, and what in them is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: The largest float16, and the least one above zero.
LARGEST, LEAST = 65504.0, 2.0**-24
HALVES = (torch.float16, torch.bfloat16)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and dataclasses, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        make = getattr(type(value), "_make", type(value))
        return make(items)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def readable(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one whose values can be looked at here."""
    return tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type != "meta"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds neither inf nor NaN. Reads the device."""
    if not readable(tensor) or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(tensor).all())


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude in ``tensor``; inf or NaN if there is one. Reads the device."""
    if not readable(tensor) or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().abs().amax())


def zeros(tensor: torch.Tensor) -> int:
    """How many elements of ``tensor`` are zero. Reads the device."""
    return int((tensor == 0).sum())


def storage(tensor: torch.Tensor) -> int:
    """Return a key that identifies memory while it is in use."""
    return tensor.untyped_storage().data_ptr()


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is all there is in its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
