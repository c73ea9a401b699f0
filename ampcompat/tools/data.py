"""Dataclasses as plain data, for JSON."""

from __future__ import annotations

import math
from dataclasses import field, fields, is_dataclass
from typing import Any

#: Metadata of a field that is left out of plain data.
UNSAID = {"key": None}


def named(key: str) -> Any:
    """A field that is called ``key`` in plain data: one that Python keeps for itself."""
    return field(metadata={"key": key})


def as_data(value: object) -> Any:
    """``value``, and what is in it, as dicts, lists, strings and numbers."""
    if is_dataclass(value):
        keys = {one.name: one.metadata.get("key", one.name) for one in fields(value)}
        return {key: as_data(getattr(value, name)) for name, key in keys.items() if key is not None}
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value


def plain(value: object) -> object:
    """``value`` with non-finite floats as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
