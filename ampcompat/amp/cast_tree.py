"""Casting every floating tensor in a nested structure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Never looked into: they hold no tensors, and some of them have a ``.to`` of their own.
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.nn.Module)


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating tensor in it cast to ``dtype``; the structure is kept.

    Lists, tuples, namedtuples, dicts (and other mappings), dataclasses and objects with a ``.to`` method (batches,
    packed sequences) are followed. Strings, numbers, integer and boolean tensors, numpy arrays and modules come back
    as they are. A container in which nothing changes comes back as the same object, so that a forward which writes
    into its argument still writes into the caller's.

    Args:
        value: Anything.
        dtype: Floating dtype.

    Returns:
        The same structure.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value
    if isinstance(value, _LEAVES):
        return value
    return _cast_container(value, dtype)


def _cast_container(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        items = [cast_tree(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _like_sequence(value, items)
    if isinstance(value, Mapping):
        pairs = {key: cast_tree(item, dtype) for key, item in value.items()}
        if all(pairs[key] is item for key, item in value.items()):
            return value
        return _like_mapping(value, pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    if type(value).__module__ != "numpy" and callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(dtype)
    return value


def _like_sequence(value: Any, items: list[Any]) -> Any:
    kind: Callable[..., Any] = type(value)
    if hasattr(kind, "_make"):  # namedtuples, PackedSequence among them
        return kind._make(items)
    if kind in (list, tuple):
        return kind(items)
    return kind(items)


def _like_mapping(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return pairs
    if isinstance(value, dict):  # OrderedDict, defaultdict, transformers' ModelOutput: keep type and attributes
        new = copy.copy(value)
        for key, item in pairs.items():
            new[key] = item
        return new
    return type(value)(pairs)  # type: ignore[call-arg]


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = cast_tree(old, dtype)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    clone = copy.copy(value)  # not dataclasses.replace: fields with init=False and __post_init__ must not run again
    for name, new in changed.items():
        object.__setattr__(clone, name, new)
    return clone
