"""Optimization levels, what may be overridden in them, and every check of what ``initialize`` is given.

apex kept the same in ``apex/amp/frontend.py``: ``Properties`` and the classes ``O0`` to ``O3``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp._amp_state import warn_or_err
from ampcompat.amp.half.record import half_weights

if TYPE_CHECKING:
    from typing import TypeGuard

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Level:
    """A row of :data:`LEVELS`: what is printed of a level, and its defaults; a None means nothing at that level."""

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
    def half_dtype(self) -> torch.dtype:
        """What it casts weights or functions to; float16 where it casts nothing."""
        if self.cast_model_type in HALF_DTYPES:
            return self.cast_model_type
        return self.patch_torch_functions_type or torch.float16


OPTIONS = tuple(field.name for field in fields(Level) if field.name != "brief")
#: The levels. Their dtype, what may be overridden in them and the texts about them follow from their rows.
LEVELS: dict[str, Level] = {
    "O0": Level("O0:  Pure FP32 training.", torch.float32, False, None, None, False, 1.0),
    "O1": Level(
        "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        *(None, True, torch.float16, None, None, "dynamic"),
    ),
    "O2": Level(
        "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        *(torch.float16, False, None, True, True, "dynamic"),
    ),
    "O3": Level("O3:  Pure FP16 training.", torch.float16, False, None, False, False, 1.0),
    "O4": Level(
        "O4:  Insert automatic casts to BFLOAT16 around Pytorch functions and Tensor methods.",
        *(None, True, torch.bfloat16, None, None, 1.0),
    ),
    "O5": Level(
        "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
        *(torch.bfloat16, False, None, True, True, 1.0),
    ),
}
_DTYPE_NAMES = dict.fromkeys(("float16", "fp16", "half"), torch.float16)
_DTYPE_NAMES |= dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16)


# -- one option --------------------------------------------------------------------------------------------------------
def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_positive(value: object) -> TypeGuard[int | float]:
    return _is_number(value) and math.isfinite(value) and value > 0


def is_scale(value: object) -> bool:
    """Whether ``value`` is a number that float32, in which scales are kept, holds as a positive normal one."""
    float32 = torch.finfo(torch.float32)
    return _is_positive(value) and float32.tiny <= value <= float32.max


def _require(fits: bool, name: str, value: object, rule: str, error: type[Exception] = ValueError) -> None:
    if not fits:
        raise error(f"{name}={value!r} - it must be {rule}.")


def checked_option(name: str, value: object) -> Any:
    """Return the override ``name=value`` in its canonical type, or raise an error; None overrides nothing."""
    if value is None:
        return None
    if name == "cast_model_type":
        return _checked_model_type(value)
    if name == "patch_torch_functions_type":
        is_half = isinstance(value, torch.dtype) and value in HALF_DTYPES
        rule = "torch.float16, torch.bfloat16 or None - pass the dtype object itself"
        _require(is_half, name, value, rule, TypeError)
        return value
    if name == "loss_scale":
        return _checked_loss_scale(value)
    return _checked_flag(name, value)


def _checked_model_type(value: object) -> Any:
    is_known_dtype = isinstance(value, torch.dtype) and value in (torch.float32, *HALF_DTYPES)
    rule = "torch.float16, torch.bfloat16, torch.float32, False (no cast) or None - pass the dtype object itself"
    _require(is_known_dtype or value is False, "cast_model_type", value, rule, TypeError)
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


# -- keywords that are no options --------------------------------------------------------------------------------------
def refuse_other_level(enabled: object, opt_level: object) -> None:
    """Refuse a string in the place of ``enabled`` that names another level than ``opt_level``, however it is spelt.

    Scripts that pass the level as the third argument, which is ``enabled``, trained at O1 under apex. A level from
    the environment overrides both.
    """
    if not isinstance(enabled, str) or os.environ.get("AMPCOMPAT_OPT_LEVEL"):
        return
    named = re.sub("^[oO0]", "O", enabled)
    if named in LEVELS and named != opt_level:
        raise TypeError(
            f"amp.initialize got {enabled!r} as its third argument, which is enabled, while opt_level={opt_level!r} -"
            f" pass the level by name: amp.initialize(model, optimizer, opt_level={named!r})."
        )


def check_keywords(
    num_losses: Any, min_loss_scale: Any, max_loss_scale: Any, cast_model_outputs: Any, verbosity: object
) -> None:
    """Check the keywords of ``initialize`` that are no options of a level."""
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


def casting_level(dtype: torch.dtype) -> str:
    """The first level that casts functions to ``dtype``."""
    return next(name for name, row in LEVELS.items() if row.patch_torch_functions_type == dtype)


def _listed_where(fits: Callable[[Level], bool]) -> str:
    """The levels whose rows fit, for a message: "'O2' or 'O3'"."""
    return " or ".join(repr(name) for name, row in LEVELS.items() if fits(row))


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


# -- all options of a call ---------------------------------------------------------------------------------------------
class Properties:
    """The options in force for one ``initialize`` call, readable as attributes and as the dict ``options``.

    apex let scripts construct it without arguments and read ``enabled``, ``opt_level`` and the table's options.
    """

    def __init__(self) -> None:
        self.__dict__["options"] = {"enabled": False, **dict.fromkeys(("opt_level", *OPTIONS))}

    def _update_options_dict(self, new_options: Mapping[str, object]) -> None:
        unknown = sorted(set(new_options) - set(self.options))
        if unknown:
            raise ValueError(f"Unknown option(s) {unknown} - the options are {sorted(self.options)} - drop the others.")
        self.options.update(new_options)

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options})"


def read_properties(opt_level: object, overrides: Mapping[str, object]) -> tuple[Properties, torch.dtype]:
    """Read the options of a call: those of its level, overridden by keywords and by the environment.

    ``AMPCOMPAT_OPT_LEVEL`` and ``AMPCOMPAT_DTYPE`` change a script from outside, and a message says so. A keyword that
    the level of the environment does not allow is dropped. Returns also the half dtype in force.
    """
    level_from_env = os.environ.get("AMPCOMPAT_OPT_LEVEL") or None
    level = _checked_level(level_from_env or opt_level)
    dtype_from_env = _dtype_from_env()
    half_dtype = dtype_from_env or LEVELS[level].half_dtype
    options = LEVELS[level].options
    if options["cast_model_type"] in HALF_DTYPES:
        options["cast_model_type"] = half_dtype
    for name, value in _accepted_overrides(level, overrides, drops_refused=level_from_env is not None).items():
        if name in ("cast_model_type", "patch_torch_functions_type") and value in HALF_DTYPES:
            half_dtype = dtype_from_env or value
            options[name] = half_dtype
        else:
            options[name] = value
    if options["patch_torch_functions_type"] is not None:
        options["patch_torch_functions_type"] = half_dtype  # what is in force
    scale_is_the_levels = overrides.get("loss_scale") is None
    if half_dtype == torch.bfloat16 and scale_is_the_levels and options["loss_scale"] == "dynamic":
        options["loss_scale"] = 1.0  # bfloat16 has float32's range: nothing to scale
    properties = Properties()
    properties.options.update({"enabled": True, "opt_level": level, **options})
    if level_from_env and level_from_env != opt_level:
        say(f"AMPCOMPAT_OPT_LEVEL={level_from_env} overrides the script's opt_level={opt_level!r}.")
    if dtype_from_env is not None:
        say(f"AMPCOMPAT_DTYPE: the half dtype is {dtype_from_env}.")
    return properties, half_dtype


def _accepted_overrides(level: str, overrides: Mapping[str, object], drops_refused: bool) -> dict[str, Any]:
    """Check ``overrides``; returns those that change something.

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


def _checked_level(level: object) -> str:
    if isinstance(level, str) and level in LEVELS:
        return level
    meant = f"O{str(level).lstrip('oO0') or '0'}"
    hint = f" Did you mean {meant!r}, with the letter O (as in Optimization)?" if meant in LEVELS else ""
    options = ", ".join(map(repr, LEVELS))
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


# -- models and optimizers ---------------------------------------------------------------------------------------------
def as_models(models: object, options: Mapping[str, Any]) -> list[torch.nn.Module]:
    """Return ``models`` as a list, each out of ``torch.compile`` and checked against ``options``."""
    wanted = "a model - models must be a torch.nn.Module, or a list or tuple of them - pass the module itself."
    given = _as_list(models)
    for model in given:
        if not isinstance(model, torch.nn.Module):
            raise _wrong_kind(model, wanted)
    uncompiled = [_torch.uncompiled(model) for model in given]
    casts_weights = options["cast_model_type"] in HALF_DTYPES
    for model in uncompiled:
        _refuse_wrapped(model)
        for path, module in model.named_modules():
            if casts_weights and not isinstance(model, torch.jit.ScriptModule):
                _refuse_scripted(path, module, options["opt_level"])
            _refuse_unsupported_weights(module)
    return uncompiled


def _refuse_wrapped(model: torch.nn.Module) -> None:
    wrapper = _torch.parallel_wrapper(model)
    if wrapper:
        raise RuntimeError(
            f"amp.initialize got a model already wrapped in {wrapper} - amp casts weights, and the wrapper has"
            " taken note of them - call amp.initialize first and wrap what it returns."
        )


def _refuse_scripted(path: str, module: torch.nn.Module, level: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            f"amp.initialize got a model with the scripted submodule {path!r} at opt_level={level!r} - the weights of"
            " a ScriptModule cannot be cast in place - script it after amp.initialize, or use opt_level='O1'."
        )


def _refuse_unsupported_weights(module: torch.nn.Module) -> None:
    """Raise a RuntimeError if a parameter of ``module`` itself has no float32 values that amp could cast or train."""
    allows_half: bool = state.view["allow_incoming_model_not_fp32"]
    refused_dtypes = () if allows_half else HALF_DTYPES
    for name, param in module._parameters.items():
        if param is None:
            continue
        is_plain = type(param) is torch.nn.Parameter and not (param.is_meta or param.is_inference())
        if is_plain and param.dtype not in refused_dtypes:  # nearly always
            continue
        shown = f"parameter {name!r} of a {type(module).__name__}"
        record = half_weights(module)
        cast_by_earlier_call = record is not None and record.dtype == param.dtype
        is_half_already = param.dtype in refused_dtypes and not cast_by_earlier_call
        reason = _why_unsupported(param, shown, is_half_already)
        if reason is not None:
            raise RuntimeError(f"amp.initialize got a model with unsupported weights: {reason}")


def _why_unsupported(param: torch.nn.Parameter, shown: str, is_half_already: bool) -> str | None:
    """Say why amp cannot cast or train ``param``, called ``shown``, and what to do about it; None if it can."""
    if _torch.is_uninitialized(param):
        return f"uninitialized {shown} - its shape must be known - run one forward pass first."
    if param.is_meta:
        return (
            f"{shown} on the meta device - masters and loss scales need values - move it with"
            " to_empty(device=...), load its weights, and call amp.initialize then."
        )
    if param.is_inference():
        return f"{shown} made under torch.inference_mode - it cannot be trained - make the model outside of it."
    if is_half_already:
        return (
            f"{shown} is {param.dtype} already - amp casts the model itself and needs its float32 weights -"
            " do not call .half() or .bfloat16() on it (amp._amp_state.allow_incoming_model_not_fp32 = True"
            " lifts this check)."
        )
    return None


def as_optimizers(optimizers: object) -> list[Optimizer]:
    """Return ``optimizers`` as a list (None: empty), each checked to be an optimizer or to look like one."""
    wanted = (
        "an optimizer - optimizers must be a torch.optim.Optimizer (or a wrapper with its methods, as LARC), or a list"
        " or tuple of them - pass the optimizer itself."
    )
    given = [] if optimizers is None else _as_list(optimizers)
    for optimizer in given:
        if not is_optimizer(optimizer):
            raise _wrong_kind(optimizer, wanted)
    for optimizer in given:
        _refuse_in_block(optimizer)
    return given


def _refuse_in_block(optimizer: Any) -> None:
    stash = getattr(optimizer, "_amp_stash", None)
    if getattr(stash, "in_block", False):
        raise RuntimeError(
            f"amp.initialize inside a scale_loss block of this {type(optimizer).__name__} - its gradients are still"
            " multiplied by the loss scale - close the block first."
        )


def _as_list(given: object) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _wrong_kind(given: object, wanted: str) -> TypeError:
    if isinstance(given, type):
        return TypeError(f"amp.initialize got the class {given.__name__} as {wanted}")
    return TypeError(f"amp.initialize got an object of type {type(given).__name__} as {wanted}")


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is an optimizer, or has what amp needs of one."""
    names = ("param_groups", "state", "step", "zero_grad", "add_param_group")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)
