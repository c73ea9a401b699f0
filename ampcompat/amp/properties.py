"""Optimization levels and what may be overridden in them: pure logic, no tensors.

========================  ========  =========  =========  =========  ========  =========
option                    O0        O1         O2         O3         O4        O5
========================  ========  =========  =========  =========  ========  =========
cast_model_type           float32   None       float16    float16    None      bfloat16
patch_torch_functions     False     True       False      False      True      False
keep_batchnorm_fp32       None      None       True       False      None      True
master_weights            False     None       True       False      None      True
loss_scale                1.0       "dynamic"  "dynamic"  1.0        1.0       1.0
========================  ========  =========  =========  =========  ========  =========
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)

_OPTIONS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
LEVELS: Mapping[str, Mapping[str, Any]] = {
    level: dict(zip(_OPTIONS, values, strict=True))
    for level, values in {
        "O0": (torch.float32, False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": (torch.float16, False, True, True, "dynamic"),
        "O3": (torch.float16, False, False, False, 1.0),
        "O4": (None, True, None, None, 1.0),
        "O5": (torch.bfloat16, False, True, True, 1.0),
    }.items()
}
BRIEFS: Mapping[str, str] = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic casts to BFLOAT16 around Pytorch functions and Tensor methods.",
    "O5": "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}
CASTING_LEVELS = ("O1", "O4")


def checked_level(level: object) -> str:
    """Return ``level`` if it names an optimization level.

    Raises:
        RuntimeError: It does not; apex raised the same type.
    """
    if isinstance(level, str) and level in LEVELS:
        return level
    hint = ""
    if isinstance(level, str) and level[:1] == "0":
        hint = " Its first character is the digit zero; the prefix is the letter O (as in Optimization)."
    raise RuntimeError(
        f"Unexpected optimization level {level!r} - options are 'O0', 'O1', 'O2', 'O3' (and 'O4', 'O5' for bfloat16)."
        f"{hint} Pass one of these as opt_level."
    )


def _flag(name: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ("True", "False"):
        return value == "True"
    raise ValueError(f"{name}={value!r} - it must be True, False, 'True', 'False' or None - pass one of these.")


def _loss_scale(value: object) -> float | str | None:
    if value is None or value == "dynamic":
        return value
    try:
        scale = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        scale = math.nan
    if isinstance(value, bool) or not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"loss_scale={value!r} - it must be 'dynamic' or a positive number (or such a number as a string)"
            " - pass loss_scale='dynamic' if unsure."
        )
    return scale


def _cast_type(name: str, value: object) -> Any:
    if value is None or value is False or (isinstance(value, torch.dtype) and value in (torch.float32, *HALF_DTYPES)):
        return value
    raise TypeError(
        f"{name}={value!r} - it must be torch.float16, torch.bfloat16, torch.float32, False (no cast) or None"
        " - pass the dtype object itself."
    )


def refusal(level: str, name: str, value: object) -> str | None:
    """Why ``level`` does not allow ``name=value``, or None where it does (apex's rules)."""
    if level in CASTING_LEVELS:
        if name == "cast_model_type" and value not in (None, False, torch.float32):
            return (
                f"cast_model_type={value!r} at {level} - {level} inserts casts around functions and keeps the weights"
                " in float32 - use opt_level='O2' or 'O3' to cast the model."
            )
        if name == "keep_batchnorm_fp32" and value is not None:
            return (
                f"keep_batchnorm_fp32={value!r} at {level} - with {level} the weights, batch norm's among them, stay in"
                " float32, so keep_batchnorm_fp32 must be None - leave it out, or use opt_level='O2'."
            )
        if name == "master_weights" and value is not None:
            return (
                f"master_weights={value!r} at {level} - with {level} the model's weights are float32 already, so there"
                " is nothing to keep masters of - leave it out, or use opt_level='O2'."
            )
    elif name == "patch_torch_functions" and value:
        return (
            f"patch_torch_functions={value!r} at {level} - only O1 (O4) inserts casts around functions"
            " - select opt_level='O1' instead."
        )
    return None


def checked_option(name: str, value: object) -> Any:
    """Return the override ``name=value`` in its canonical type, whatever the level.

    Raises:
        TypeError: ``cast_model_type`` is not a dtype.
        ValueError: A flag or a loss scale cannot be read.
    """
    if name == "cast_model_type":
        return _cast_type(name, value)
    if name == "loss_scale":
        return _loss_scale(value)
    return _flag(name, value)


class Properties:
    """The options in force for one ``initialize`` call, readable as attributes and as the dict ``options``.

    apex let scripts construct it without arguments and read ``enabled``, ``opt_level`` and the table's options.
    """

    def __init__(self) -> None:
        options: dict[str, Any] = dict.fromkeys(("opt_level", *_OPTIONS))
        self.__dict__["options"] = {"enabled": False, **options}

    def _update_options_dict(self, new_options: Mapping[str, Any]) -> None:
        unknown = sorted(set(new_options) - set(self.options))
        if unknown:
            raise ValueError(f"Unknown option(s) {unknown} - the options are {sorted(self.options)} - drop the others.")
        self.options.update(new_options)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            self.__dict__[name] = value
        elif name in _OPTIONS:
            value = checked_option(name, value)
            reason = refusal(self.options["opt_level"] or "O0", name, value)
            if reason:
                raise RuntimeError(reason)
            self.options[name] = value
        else:
            self.options[name] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options})"
