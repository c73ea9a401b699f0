"""Traverse nested data: arguments and outputs of a forward, arguments of a registered function.

Lists, tuples, namedtuples, mappings, their subclasses and dataclasses are followed, within what dynamo traces. Other
collections (a deque, a set) are left alone: no model is known that takes or returns tensors in one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ampcompat import _torch

T = TypeVar("T")

#: Never looked into: they hold no tensors, and some of them have a ``.to`` of their own.
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.nn.Module)


def cast_tree(value: T, dtype: torch.dtype) -> T:
    """Cast every floating tensor in ``value`` to ``dtype``; objects with a ``.to`` method (batches) cast themselves.

    Reproduces what apex did to the inputs and outputs of an O2 model (``apex/amp/_initialize.py: applier``), for
    dataclasses and mappings of any kind too. What needs no cast is returned itself, containers included, so that a
    forward that writes into its argument writes into the caller's.
    """
    result, _ = _map(value, functools.partial(_torch.cast_to, dtype=dtype), objects=True)
    return result


def tensors_in(value: object, objects: bool = True) -> list[torch.Tensor]:
    """List the tensors in ``value``, in order; see :func:`map_tree`. Objects with ``.to`` are not looked into."""
    tensors: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        return leaf

    map_tree(value, collect, objects)
    return tensors


def map_tree(value: T, function: Callable[[Any], object], objects: bool = True) -> T:
    """Replace every tensor in ``value``, and every object that has ``.to``, by ``function`` of it.

    A container in which nothing changes is returned itself, never a copy. Without ``objects``, dataclasses and objects
    with ``.to`` are left alone: a method's ``self`` may be one.
    """
    mapped, _ = _map(value, function, objects)
    return mapped


def _map(value: T, function: Callable[[Any], Any], objects: bool) -> tuple[T, bool]:
    """As :func:`map_tree`; says whether anything changed: torch 2.4 compiles ``is`` of two lists as ``==``."""
    if isinstance(value, (list, tuple)):
        return _map_parts(value, value, function, objects)
    if isinstance(value, torch.Tensor):
        new = function(value)
        return new, new is not value
    if isinstance(value, _LEAVES):
        return value, False
    if isinstance(value, (dict, Mapping)):
        return _map_parts(value, value.values(), function, objects)
    if not objects or isinstance(value, type):
        return value, False
    return _map_object(value, function)


def _map_object(value: Any, function: Callable[[Any], Any]) -> tuple[Any, bool]:
    """:func:`_map` of what is not a tensor, list, tuple, mapping or leaf."""
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return _map_parts(value, parts, function, objects=True)
    if callable(getattr(value, "to", None)):
        new = function(value)
        return new, new is not value
    return value, False


def _map_parts(value: Any, parts: Any, function: Callable[[Any], Any], objects: bool) -> tuple[Any, bool]:
    """:func:`_map` of a container ``value``, which is made of ``parts``."""
    items: list[object] = []
    changed = False
    for part in parts:
        # Tensors and leaves, which are the most, without another call.
        if isinstance(part, torch.Tensor):
            item = function(part)
            changed = changed or item is not part
        elif isinstance(part, _LEAVES):
            item = part
        else:
            item, inside = _map(part, function, objects)
            changed = changed or inside
        items.append(item)
    if not changed:
        return value, False
    if type(value) is tuple:  # a forward's arguments: spares them a call
        return tuple(items), True
    return _rebuild(value, items), True


def _rebuild(value: Any, items: list[object]) -> Any:
    """Make a container like ``value`` of ``items``, which are its own in their order, some replaced."""
    kind: Any = type(value)
    if isinstance(value, (list, tuple)):  # _make: namedtuples, PackedSequence among them
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, dict(zip(value, items, strict=True)))
    return _rebuild_dataclass(value, items)


def _rebuild_mapping(value: Any, pairs: dict[Any, object]) -> Any:
    kind: Any = type(value)
    if kind is dict:
        return pairs
    if not isinstance(value, dict):
        return kind(pairs)
    clone = copy.copy(value)  # OrderedDict, defaultdict, transformers' ModelOutput: keep type and attributes
    for key, item in pairs.items():
        clone[key] = item
    return clone


def _rebuild_dataclass(value: Any, items: list[object]) -> Any:
    clone = copy.copy(value)  # not dataclasses.replace: fields with init=False, __post_init__ must not run again
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        if item is not getattr(value, field.name, None):
            object.__setattr__(clone, field.name, item)
    return clone
