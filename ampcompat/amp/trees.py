"""The walker of nested data: arguments of a forward, its outputs, the arguments of a registered function.

Followed are lists, tuples, namedtuples, dicts and other mappings, their subclasses, and dataclasses. Compiled code goes
through it, so it stays within what dynamo traces.
"""

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

    Reproduces what apex did to the inputs and outputs of an O2 model (``apex/amp/_initialize.py: applier``), dataclasses
    and mappings of any kind included. Objects with a ``.to`` method (batches) are asked to cast themselves.

    Args:
        value: Anything.
        dtype: Floating dtype.

    Returns:
        The same structure. Strings, numbers, integer and boolean tensors, numpy arrays and modules come back as they
        are, and so does a container in which nothing changes: a forward that writes into its argument still writes
        into the caller's.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and (leaf.dtype == dtype or not leaf.is_floating_point()):
            return leaf
        return leaf.to(dtype)

    return map_tree(value, cast)


def tensors_in(value: Any, objects: bool = True) -> list[torch.Tensor]:
    """List the tensors in ``value``, in order; see :func:`map_tree`. Objects with ``.to`` are not looked into."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_tree(value, collect, objects)
    return found


def map_tree(value: Any, function: Callable[[Any], Any], objects: bool = True) -> Any:
    """Replace every tensor in ``value``, and every object that has ``.to``, by ``function`` of it.

    Args:
        value: Anything.
        function: Gets a tensor or an object with ``.to`` and returns its replacement, or the same object.
        objects: Whether to follow dataclasses and objects with ``.to``. A method's own ``self`` may be one.

    Returns:
        The same structure; a container in which nothing changes is returned itself, never a copy.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items, changed = [], False
        for item in value:
            new = function(item) if isinstance(item, torch.Tensor) else map_tree(item, function, objects)
            changed = changed or new is not item
            items.append(new)
        return _like_sequence(value, items) if changed else value
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (dict, Mapping)):
        pairs, changed = {}, False
        for key, item in value.items():
            new = map_tree(item, function, objects)
            changed = changed or new is not item
            pairs[key] = new
        return _like_mapping(value, pairs) if changed else value
    if not objects or isinstance(value, type):
        return value
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        pairs = map_tree(fields, function)
        return value if pairs is fields else _like_dataclass(value, pairs)
    if type(value).__module__ != "numpy" and callable(getattr(value, "to", None)):
        return function(value)
    return value


def _like_sequence(value: Any, items: list[Any]) -> Any:
    kind: Any = type(value)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)  # _make: namedtuples, PackedSequence among them


def _like_mapping(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return pairs
    if isinstance(value, dict):  # OrderedDict, defaultdict, transformers' ModelOutput: keep type and attributes
        new = copy.copy(value)
        for key, item in pairs.items():
            new[key] = item
        return new
    return type(value)(pairs)  # type: ignore[call-arg]


def _like_dataclass(value: Any, pairs: dict[str, Any]) -> Any:
    clone = copy.copy(value)  # not dataclasses.replace: fields with init=False and __post_init__ must not run again
    for name, new in pairs.items():
        if new is not getattr(value, name, None):
            object.__setattr__(clone, name, new)
    return clone
