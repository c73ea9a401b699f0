"""Reading and checking what ``initialize`` is given, before anything is touched."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat.amp._amp_state import _amp_state, warn_or_err
from ampcompat.amp.properties import HALF_DTYPES, LEVELS, Properties, checked_level, checked_option, refusal

_DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def read_properties(opt_level: object, overrides: Mapping[str, object]) -> tuple[Properties, torch.dtype]:
    """Options of a call: those of its level, overridden by keywords and by the environment.

    ``AMPCOMPAT_OPT_LEVEL`` and ``AMPCOMPAT_DTYPE`` change a script from outside; a keyword that the level from outside
    does not allow is dropped. Both say so.

    Returns:
        The properties, and the half dtype in force (float16 unless bfloat16 was asked for).

    Raises:
        RuntimeError: Unknown level, or a keyword that the level does not allow.
        TypeError, ValueError: A keyword's value cannot be read.
    """
    outside = os.environ.get("AMPCOMPAT_OPT_LEVEL") or None
    level = checked_level(outside or opt_level)
    dtype = _dtype_from_environment()
    half = dtype or (torch.bfloat16 if level in ("O4", "O5") else torch.float16)
    options = dict(LEVELS[level])
    if options["cast_model_type"] in HALF_DTYPES:
        options["cast_model_type"] = half
    if half == torch.bfloat16 and options["loss_scale"] == "dynamic":
        options["loss_scale"] = 1.0  # bfloat16 has float32's range: nothing to scale
    for name, value in overrides.items():
        checked = checked_option(name, value)
        if checked is None:
            continue
        reason = refusal(level, name, checked)
        if reason and outside:
            say(f"AMPCOMPAT_OPT_LEVEL={outside}: the script's {name}={value!r} is not for this level and is dropped.")
            continue
        if reason:
            warn_or_err(reason)
        if name == "cast_model_type" and checked in HALF_DTYPES:
            checked = half = dtype or checked
            if half == torch.bfloat16 and overrides.get("loss_scale") is None:
                options["loss_scale"] = 1.0
        options[name] = checked
    properties = Properties()
    properties._update_options_dict({"enabled": True, "opt_level": level, **options})
    if outside and outside != opt_level:
        say(f"AMPCOMPAT_OPT_LEVEL={outside} overrides the script's opt_level={opt_level!r}.")
    if dtype is not None:
        say(f"AMPCOMPAT_DTYPE: the half dtype is {dtype}.")
    return properties, half


def _dtype_from_environment() -> torch.dtype | None:
    name = os.environ.get("AMPCOMPAT_DTYPE") or None
    if name is None:
        return None
    if name not in _DTYPE_NAMES:
        raise ValueError(f"AMPCOMPAT_DTYPE={name!r} - it must be one of {sorted(_DTYPE_NAMES)} - set one of these.")
    return _DTYPE_NAMES[name]


def as_models(models: object) -> list[torch.nn.Module]:
    """``models`` as a list, each checked to be a module that may be initialized now."""
    found: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in found:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"amp.initialize got {_name(model)} as a model - models must be a torch.nn.Module, or a list or tuple"
                " of them - pass the module itself."
            )
        wrapper = _torch.parallel_wrapper(model)
        if wrapper:
            raise RuntimeError(
                f"amp.initialize got a model already wrapped in {wrapper} - amp casts weights, and the wrapper has"
                " taken note of them - call amp.initialize first and wrap what it returns."
            )
        _check_weights(model)
    return found


def check_unsharded(models: list[torch.nn.Module], properties: Properties) -> None:
    """Refuse to cast weights of which this rank holds a part (``fully_shard``)."""
    if properties.cast_model_type not in HALF_DTYPES:
        return
    for model in models:
        for name, param in model.named_parameters():
            if _torch.is_sharded(param):
                raise RuntimeError(
                    f"amp.initialize got a model sharded by fully_shard (its parameter {name!r} is a DTensor) at"
                    f" opt_level={properties.opt_level!r} - float32 masters of shards are fully_shard's own business -"
                    " use opt_level='O1' (O4 for bfloat16), or fully_shard's MixedPrecisionPolicy without amp."
                )


def _check_weights(model: torch.nn.Module) -> None:
    for module in model.modules():
        ours = module.__dict__.get("_amp_half", (None,))[0]
        for name, param in module._parameters.items():
            if param is None:
                continue
            if _torch.is_uninitialized(param):
                raise RuntimeError(
                    f"amp.initialize got a model with the uninitialized parameter {name!r} of a"
                    f" {type(module).__name__} - its shape must be known - run one forward pass first."
                )
            if param.device.type == "meta":
                raise RuntimeError(
                    f"amp.initialize got a model with the parameter {name!r} of a {type(module).__name__} on the meta"
                    " device - masters and loss scales need values - move it with to_empty(device=...), load its"
                    " weights, and call amp.initialize then."
                )
            if param.is_inference():
                raise RuntimeError(
                    f"amp.initialize got a model whose parameter {name!r} was made under torch.inference_mode - such"
                    " tensors cannot be trained - make the model outside of it."
                )
            if param.dtype in HALF_DTYPES and param.dtype != ours and not _amp_state.allow_incoming_model_not_fp32:
                raise RuntimeError(
                    f"amp.initialize got a model whose parameter {name!r} of a {type(module).__name__} is {param.dtype}"
                    " already - amp casts the model itself and needs its float32 weights - do not call .half() or"
                    " .bfloat16() on it (amp._amp_state.allow_incoming_model_not_fp32 = True lifts this check)."
                )


def as_optimizers(optimizers: object) -> list[Any]:
    """``optimizers`` as a list (None: empty), each checked to be an optimizer or a wrapper that looks like one."""
    if optimizers is None:
        return []
    found = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in found:
        if not is_optimizer(optimizer):
            raise TypeError(
                f"amp.initialize got {_name(optimizer)} as an optimizer - optimizers must be a torch.optim.Optimizer"
                " (or a wrapper with its methods, as LARC), or a list or tuple of them - pass the optimizer itself."
            )
        stash = getattr(optimizer, "_amp_stash", None)
        if stash is not None and stash.in_block:
            raise RuntimeError(
                f"amp.initialize inside a scale_loss block of this {type(optimizer).__name__} - its gradients are still"
                " multiplied by the loss scale - close the block first."
            )
    return found


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is an optimizer, or has what amp needs of one."""
    if isinstance(value, type):
        return False
    names = ("param_groups", "state", "step", "zero_grad", "add_param_group")
    return isinstance(value, torch.optim.Optimizer) or all(hasattr(value, name) for name in names)


def check_verbosity(verbosity: object) -> int:
    """Check the ``verbosity`` keyword of ``initialize``; scripts pass False, too."""
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity={verbosity!r} - it must be an integer - pass 0 for silence, 1 for apex's messages.")
    return int(verbosity)


def check_scaling(num_losses: object, min_loss_scale: object, max_loss_scale: object) -> None:
    """Check the scaler keywords of ``initialize``."""
    if not isinstance(num_losses, int) or isinstance(num_losses, bool) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r} - it must be a positive integer - pass how many losses you scale.")
    for name, value in (("min_loss_scale", min_loss_scale), ("max_loss_scale", max_loss_scale)):
        if value is None and name == "min_loss_scale":
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            raise ValueError(f"{name}={value!r} - it must be a positive number - pass a power of two.")
    if min_loss_scale is not None and min_loss_scale > max_loss_scale:  # type: ignore[operator]
        raise ValueError(
            f"min_loss_scale={min_loss_scale!r} with max_loss_scale={max_loss_scale!r} - the minimum must not exceed"
            " the maximum - swap or drop one."
        )


def check_outputs(cast_model_outputs: object) -> None:
    """Check the ``cast_model_outputs`` keyword of ``initialize``."""
    floating = isinstance(cast_model_outputs, torch.dtype) and cast_model_outputs.is_floating_point
    if cast_model_outputs is not None and not floating:
        raise TypeError(
            f"cast_model_outputs={cast_model_outputs!r} - it must be a floating torch.dtype or None - pass"
            " torch.float32 for instance."
        )


def _name(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
