"""Data as JSON has it: the one writer of it for the precision report, ``parity`` and explain."""

from __future__ import annotations

import json
import math


def to_json(value: object, indent: int | None = None) -> str:
    """``value`` as JSON; non-finite numbers, which JSON lacks, are the strings ``"nan"``, ``"inf"`` and ``"-inf"``."""
    return json.dumps(plain(value), indent=indent)


def plain(value: object) -> object:
    """``value`` with non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
