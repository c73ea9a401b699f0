"""Casting every floating tensor in a nested structure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
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

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and (leaf.dtype == dtype or not leaf.is_floating_point()):
            return leaf
        return leaf.to(dtype)

    return map_tree(value, cast)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts. Compiled code goes through it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tree(value: Any, function: Callable[[Any], Any]) -> Any:
    """As :func:`cast_tree`, with any ``function`` of a tensor or of an object that has ``.to``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tree(item, function) for item in value]
        for new, old in zip(items, value, strict=True):
            if new is not old:
                return _like_sequence(value, items)
        return value
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, Mapping):
        pairs = {key: map_tree(item, function) for key, item in value.items()}
        if all(pairs[key] is item for key, item in value.items()):
            return value
        return _like_mapping(value, pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, function)
    if type(value).__module__ != "numpy" and callable(getattr(value, "to", None)) and not isinstance(value, type):
        return function(value)
    return value


def _like_sequence(value: Any, items: list[Any]) -> Any:
    kind: Callable[..., Any] = type(value)
    if hasattr(kind, "_make"):  # namedtuples, PackedSequence among them
        return kind._make(items)
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


def _map_dataclass(value: Any, function: Callable[[Any], Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = map_tree(old, function)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    clone = copy.copy(value)  # not dataclasses.replace: fields with init=False and __post_init__ must not run again
    for name, new in changed.items():
        object.__setattr__(clone, name, new)
    return clone
