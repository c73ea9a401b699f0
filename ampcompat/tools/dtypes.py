"""Names of dtypes, and which of them are half. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HALF_NAMES = frozenset({"float16", "bfloat16"})
#: What the command line takes for a half dtype.
SPELLINGS = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}
SHORT_NAMES = {"float16": "fp16", "bfloat16": "bf16"}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of ``dtype``, as in "float16"."""
    return str(dtype).removeprefix("torch.")


def is_half(name: str) -> bool:
    """Whether ``name`` is that of a half dtype."""
    return name in HALF_NAMES
