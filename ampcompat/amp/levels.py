"""The optimization levels: a table of their defaults, and which overrides a level refuses.

A level is a row of :data:`LEVELS` and nothing else. apex had a class for each (``apex/amp/frontend.py: O0`` to ``O3``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ampcompat._types import HALF_DTYPES


@dataclass(frozen=True, kw_only=True)
class Level:
    """A row of :data:`LEVELS`: what is printed of a level, and its defaults. None: the option does not apply."""

    brief: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    patch_torch_functions_type: torch.dtype | None  # of ROCm's fork
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str

    @property
    def options(self) -> dict[str, Any]:
        """The defaults by name."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def casts_model(self) -> bool:
        """Whether it casts the weights to half."""
        return self.cast_model_type in HALF_DTYPES

    @property
    def half_dtype(self) -> torch.dtype:
        """What it casts weights or functions to; float16 where it casts nothing."""
        if self.cast_model_type in HALF_DTYPES:
            return self.cast_model_type
        return self.patch_torch_functions_type or torch.float16


OPTIONS = tuple(field.name for field in fields(Level) if field.name != "brief")
#: The levels. Their dtype, what may be overridden in them and the texts about them follow from their rows.
LEVELS: dict[str, Level] = {
    "O0": Level(
        brief="O0:  Pure FP32 training.",
        cast_model_type=torch.float32,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=None,
        master_weights=False,
        loss_scale=1.0,
    ),
    "O1": Level(
        brief="O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        cast_model_type=None,
        patch_torch_functions=True,
        patch_torch_functions_type=torch.float16,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale="dynamic",
    ),
    "O2": Level(
        brief="O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    "O3": Level(
        brief="O3:  Pure FP16 training.",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=False,
        master_weights=False,
        loss_scale=1.0,
    ),
    "O4": Level(
        brief="O4:  Insert automatic casts to BFLOAT16 around Pytorch functions and Tensor methods.",
        cast_model_type=None,
        patch_torch_functions=True,
        patch_torch_functions_type=torch.bfloat16,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale=1.0,
    ),
    "O5": Level(
        brief="O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.bfloat16,
        patch_torch_functions=False,
        patch_torch_functions_type=None,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale=1.0,
    ),
}


def casting_level(dtype: torch.dtype) -> str:
    """The first level that casts functions to ``dtype``."""
    return next(name for name, row in LEVELS.items() if row.patch_torch_functions_type == dtype)


# -- which overrides a level refuses -----------------------------------------------------------------------------------
def refusal(level: str, name: str, value: object) -> str | None:
    """Say why ``level`` does not allow ``name=value``, or None where it does; apex allowed and refused the same."""
    if value is None:
        return None
    if LEVELS[level].patch_torch_functions:
        reason = _why_not_beside_casts(LEVELS[level], name, value)
    else:
        reason = _why_not_without_casts(name, value)
    if reason is None:
        return None
    return f"{name}={value!r} at {level} - {reason}"


def _why_not_beside_casts(row: Level, name: str, value: object) -> str | None:
    """Why a level that casts functions, and no weights, does not take ``name=value``; None if it does."""
    dtype = row.half_dtype
    if name == "patch_torch_functions_type":
        if value == dtype:
            return None
        other = _listed_where(lambda other: other.patch_torch_functions_type == value)
        return f"this level casts to {dtype} - select opt_level={other} instead."
    if name == "cast_model_type":
        if value in (False, torch.float32):
            return None
        casting = _listed_where(lambda other: other.cast_model_type == dtype)
        return f"the weights stay float32 - use opt_level={casting} to cast the model."
    with_masters = _listed_where(lambda other: other.cast_model_type == dtype and bool(other.master_weights))
    if name == "keep_batchnorm_fp32":
        return f"all weights stay float32, so it must be None - leave it out, or use opt_level={with_masters}."
    if name == "master_weights":
        return f"the model's weights are their own masters - leave it out, or use opt_level={with_masters}."
    return None


def _why_not_without_casts(name: str, value: object) -> str | None:
    """Why a level that does not cast functions does not take ``name=value``; None if it does."""
    casting = _listed_where(lambda row: row.patch_torch_functions)
    if name == "patch_torch_functions" and value:
        return f"this level casts no functions - select opt_level={casting} instead."
    if name == "patch_torch_functions_type":
        return f"this level casts no functions - leave it out, or select opt_level={casting} instead."
    return None


def _listed_where(fits: Callable[[Level], bool]) -> str:
    """The levels whose rows fit, for a message: "'O2' or 'O3'"."""
    return " or ".join(repr(name) for name, row in LEVELS.items() if fits(row))
