"""The options in force for one session: its level, overridden by keywords and by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ampcompat._log import say
from ampcompat._types import HALF, HALF_DTYPES
from ampcompat.amp._amp_state import warn_or_err
from ampcompat.amp.levels import LEVELS, OPTIONS, refusal
from ampcompat.amp.options import checked_option

_DTYPE_NAMES = {name: dtype for dtype, row in HALF.items() for name in row.names}


class Properties:
    """The options in force for one session, readable as attributes and as the dict ``options``.

    apex let scripts construct it without arguments and read ``enabled``, ``opt_level`` and the table's options.
    """

    def __init__(self) -> None:
        self.__dict__["options"] = {"enabled": False, **dict.fromkeys(("opt_level", *OPTIONS))}

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("options", ()):
            return self.options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in OPTIONS:
            value = checked_option(name, value)
            reason = refusal(self.options["opt_level"] or "O0", name, value)
            if reason is not None:
                raise RuntimeError(reason)
        if name in self.options:
            self.options[name] = value
        else:
            self.__dict__[name] = value


def read_properties(opt_level: object, overrides: Mapping[str, object]) -> tuple[Properties, torch.dtype]:
    """Return the options of a session, and its half dtype: by its level, its keywords and the environment.

    ``AMPCOMPAT_OPT_LEVEL`` and ``AMPCOMPAT_DTYPE`` change a script from outside, and a message says so. A keyword that
    the level of the environment does not allow is dropped.
    """
    level_from_env = os.environ.get("AMPCOMPAT_OPT_LEVEL") or None
    level = _checked_level(opt_level) if level_from_env is None else _checked_level(level_from_env, from_env=True)
    dtype_from_env = _dtype_from_env()
    accepted = _accepted_overrides(level, overrides, drops_refused=level_from_env is not None)
    half_dtype = dtype_from_env or _overriding_dtype(accepted) or LEVELS[level].half_dtype
    properties = Properties()
    properties.options.update({"enabled": True, "opt_level": level, **_options(level, accepted, half_dtype)})
    if level_from_env and level_from_env != opt_level:
        say(f"AMPCOMPAT_OPT_LEVEL={level_from_env} overrides the script's opt_level={opt_level!r}.")
    if dtype_from_env is not None:
        say(f"AMPCOMPAT_DTYPE: the half dtype is {dtype_from_env}.")
    return properties, half_dtype


def _options(level: str, accepted: Mapping[str, Any], half_dtype: torch.dtype) -> dict[str, Any]:
    """The options of ``level``, in ``half_dtype``, with the overrides that were ``accepted``."""
    options = {**LEVELS[level].options, **accepted}
    if options["cast_model_type"] in HALF_DTYPES:
        options["cast_model_type"] = half_dtype
    if options["patch_torch_functions_type"] is not None:
        options["patch_torch_functions_type"] = half_dtype
    level_may_scale = not HALF[LEVELS[level].half_dtype].has_range_of_float32
    has_nothing_to_scale = level_may_scale and HALF[half_dtype].has_range_of_float32
    if has_nothing_to_scale and "loss_scale" not in accepted:
        options["loss_scale"] = 1.0
    return options


def _checked_level(level: object, from_env: bool = False) -> str:
    if isinstance(level, str) and level in LEVELS:
        return level
    meant = f"O{str(level).lstrip('oO0') or '0'}"
    hint = f" Did you mean {meant!r}, with the letter O (as in Optimization)?" if meant in LEVELS else ""
    options = ", ".join(map(repr, LEVELS))
    if from_env:
        raise RuntimeError(f"AMPCOMPAT_OPT_LEVEL={level!r} - it must be one of {options} - set one of these.{hint}")
    raise RuntimeError(
        f"Unexpected optimization level {level!r} - options are {options}.{hint} Pass one of these as opt_level."
    )


def _dtype_from_env() -> torch.dtype | None:
    """The half dtype that ``AMPCOMPAT_DTYPE`` names; None where it is not set."""
    name = os.environ.get("AMPCOMPAT_DTYPE")
    if not name:
        return None
    if name not in _DTYPE_NAMES:
        raise ValueError(f"AMPCOMPAT_DTYPE={name!r} - it must be one of {[*_DTYPE_NAMES]} - set one of these.")
    return _DTYPE_NAMES[name]


def _accepted_overrides(level: str, overrides: Mapping[str, object], drops_refused: bool) -> dict[str, Any]:
    """Check ``overrides``, and return the ones that change something.

    Args:
        level: The level in force.
        overrides: Keywords of ``initialize``; None overrides nothing.
        drops_refused: Whether one that the level does not allow is dropped, with a message, instead of being an error.
    """
    accepted = {}
    for name, value in overrides.items():
        checked = checked_option(name, value)
        if checked is None:
            continue
        reason = refusal(level, name, checked)
        if reason is not None and drops_refused:
            say(f"AMPCOMPAT_OPT_LEVEL={level}: the script's {name}={value!r} is not for this level and is dropped.")
            continue
        if reason is not None:
            warn_or_err(reason)
        accepted[name] = checked
    return accepted


def _overriding_dtype(overrides: Mapping[str, Any]) -> torch.dtype | None:
    """The half dtype that a keyword asks for; None where none does."""
    for name in ("cast_model_type", "patch_torch_functions_type"):
        dtype: torch.dtype | bool | None = overrides.get(name)
        if isinstance(dtype, torch.dtype) and dtype in HALF_DTYPES:
            return dtype
    return None
