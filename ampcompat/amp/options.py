"""What each keyword of ``initialize`` may be, apart from any level: one check a keyword, and one error."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch

from ampcompat._types import HALF_DTYPES

if TYPE_CHECKING:
    from typing import TypeGuard

_HALVES = ", ".join(map(str, HALF_DTYPES))


# -- options of a level ------------------------------------------------------------------------------------------------
def checked_option(name: str, value: object) -> Any:
    """Return the override ``name=value`` in its canonical type, or raise an error; None overrides nothing."""
    if value is None:
        return None
    if name == "cast_model_type":
        return _checked_model_type(value)
    if name == "patch_torch_functions_type":
        return _checked_function_type(value)
    if name == "loss_scale":
        return _checked_loss_scale(value)
    return _checked_flag(name, value)


def _checked_model_type(value: object) -> Any:
    is_known_dtype = isinstance(value, torch.dtype) and value in (torch.float32, *HALF_DTYPES)
    rule = f"{_HALVES}, torch.float32, False (no cast) or None - pass the dtype object itself"
    _require(is_known_dtype or value is False, "cast_model_type", value, rule, TypeError)
    return value


def _checked_function_type(value: object) -> Any:
    is_half = isinstance(value, torch.dtype) and value in HALF_DTYPES
    rule = f"{_HALVES} or None - pass the dtype object itself"
    _require(is_half, "patch_torch_functions_type", value, rule, TypeError)
    return value


def _checked_loss_scale(value: Any) -> Any:
    """Return "dynamic" or a number; the number may be given as a string."""
    if value == "dynamic":
        return value
    scale = value
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            scale = float(value)
    rule = "'dynamic' or a positive number (or such a number as a string) - pass loss_scale='dynamic' if unsure"
    _require(is_scale(scale), "loss_scale", value, rule)
    return scale


def _checked_flag(name: str, value: object) -> bool:
    rule = "True, False, 'True', 'False' or None - pass one of these"
    _require(isinstance(value, bool) or value in ("True", "False"), name, value, rule)
    return value in (True, "True")


# -- keywords that are not options of a level --------------------------------------------------------------------------
def check_keywords(
    num_losses: Any, min_loss_scale: Any, max_loss_scale: Any, cast_model_outputs: Any, verbosity: object
) -> None:
    """Check the keywords of ``initialize`` that are not options of a level."""
    is_count = isinstance(num_losses, int) and not isinstance(num_losses, bool) and num_losses >= 0
    _require(is_count, "num_losses", num_losses, "an integer from 0 on - pass how many losses you scale")
    rule = "a positive number - pass a power of two"
    _require(_is_positive(max_loss_scale), "max_loss_scale", max_loss_scale, rule)
    if min_loss_scale is not None:
        _require(_is_positive(min_loss_scale), "min_loss_scale", min_loss_scale, rule)
    if cast_model_outputs is not None:
        is_floating = isinstance(cast_model_outputs, torch.dtype) and cast_model_outputs.is_floating_point
        rule = "a floating torch.dtype or None - pass torch.float32 for instance"
        _require(is_floating, "cast_model_outputs", cast_model_outputs, rule, TypeError)
    rule = "an integer - pass 0 for silence, 1 for apex's messages"  # scripts pass False, too
    _require(isinstance(verbosity, int), "verbosity", verbosity, rule, TypeError)
    if min_loss_scale is not None and min_loss_scale > max_loss_scale:
        raise ValueError(
            f"min_loss_scale={min_loss_scale!r} with max_loss_scale={max_loss_scale!r} - the minimum must not exceed"
            " the maximum - swap or drop one (D28)."
        )


# -- numbers -----------------------------------------------------------------------------------------------------------
def number(value: Any) -> float:
    """Return ``value`` as a float: a number of Python, numpy or torch, or such a number as a string; otherwise NaN."""
    try:
        return float(value)
    except Exception:  # whatever a foreign object raises
        return math.nan


def whole_number(name: str, value: Any) -> int:
    """Return ``value``, which a script has written to ``name``, as an int that torch's int32 holds.

    Raises:
        ValueError: It is no whole number.
    """
    as_float = number(value)
    if not as_float.is_integer():
        raise ValueError(f"{name} = {value!r} - it must be a whole number - write 2000, for example.")
    return max(-(2**31), min(int(as_float), 2**31 - 1))


def is_scale(value: object) -> bool:
    """Whether ``value`` is a number that float32, in which scales are kept, holds as a positive normal one."""
    float32 = torch.finfo(torch.float32)
    return _is_positive(value) and float32.tiny <= value <= float32.max


def _is_positive(value: object) -> TypeGuard[int | float]:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def _require(fits: bool, name: str, value: object, rule: str, error: type[Exception] = ValueError) -> None:
    if not fits:
        raise error(f"{name}={value!r} - it must be {rule}.")
