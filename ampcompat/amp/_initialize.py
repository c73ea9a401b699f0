"""Home of a name that scripts import from ``apex.amp._initialize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ampcompat.amp.casts.trees import map_tree

T = TypeVar("T")

__all__ = ["applier"]


def applier(value: T, fn: Callable[[Any], object]) -> T:
    """Replace every tensor in ``value``, and every object with a ``.to``, by ``fn`` of it."""
    return map_tree(value, fn)
