"""The checks of the models, the optimizers and the third argument of ``initialize``, before it changes anything.

What its other keywords may be is in :mod:`ampcompat.amp.options`.
"""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES, is_optimizer
from ampcompat.amp._amp_state import view_state
from ampcompat.amp.half.forward import ModelPolicy
from ampcompat.amp.half.record import record_of
from ampcompat.amp.levels import LEVELS
from ampcompat.amp.scaling.block import open_block_of
from ampcompat.amp.scaling.groups import model_tensor
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index


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


# -- models ------------------------------------------------------------------------------------------------------------
def as_models(models: object, opt_level: str, casts_weights: bool) -> list[torch.nn.Module]:
    """Return ``models`` as a list, each out of ``torch.compile`` and checked.

    Args:
        models: As given to ``initialize``.
        opt_level: The level in force.
        casts_weights: Whether the weights are to be cast to half.
    """
    wanted = "a model - models must be a torch.nn.Module, or a list or tuple of them - pass the module itself."
    given = as_list(models)
    for model in given:
        if not isinstance(model, torch.nn.Module):
            raise _wrong_kind(model, wanted)
    uncompiled = [_torch.uncompiled(model) for model in given]
    for model in uncompiled:
        _refuse_wrapped(model)
        if casts_weights:
            _refuse_scripted_parts(model, opt_level)
        cast_before = _cast_by_amp(model)
        for module in model.modules():
            _refuse_unsupported_weights(module, module in cast_before)
    return uncompiled


def _refuse_wrapped(model: torch.nn.Module) -> None:
    wrapper = _torch.parallel_wrapper(model)
    if wrapper:
        raise RuntimeError(
            f"amp.initialize got a model already wrapped in {wrapper} - amp casts weights, and the wrapper has"
            " taken note of them - call amp.initialize first and wrap what it returns."
        )


def _refuse_scripted_parts(model: torch.nn.Module, level: str) -> None:
    """Raise a RuntimeError if a part of ``model`` is a ScriptModule with weights to be cast.

    One that is scripted as a whole passes through.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return
    for path, module in model.named_modules():
        tensors = [*module.parameters(), *module.buffers()]
        if isinstance(module, torch.jit.ScriptModule) and any(map(torch.is_floating_point, tensors)):
            raise RuntimeError(
                f"amp.initialize got a model with the scripted submodule {path!r} at opt_level={level!r} - the weights"
                " of a ScriptModule cannot be cast in place - script it after amp.initialize, or use opt_level='O1'."
            )


def _cast_by_amp(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules in ``model`` that amp has cast before, and what was added below them since.

    What is added may be made of half weights: parametrizations of ``torch.nn.utils`` reuse the weight.
    """
    cast: set[torch.nn.Module] = set()
    for module in model.modules():
        if module not in cast and record_of(module) is not None:
            cast.update(module.modules())
    return cast


def _refuse_unsupported_weights(module: torch.nn.Module, cast_before: bool) -> None:
    """Raise a RuntimeError if a parameter of ``module`` itself has no float32 values that amp could cast or train.

    Args:
        module: A part of a model.
        cast_before: Whether amp has cast its weights before, which may be half then.
    """
    allows_half: bool = view_state.view["allow_incoming_model_not_fp32"]
    for name, param in module._parameters.items():
        if param is None:
            continue
        is_half = param.dtype in HALF_DTYPES
        is_half_already = is_half and not allows_half and not cast_before
        why = _why_unsupported(param, is_half_already)
        if why is None:
            continue
        raise RuntimeError(
            f"amp.initialize got a model with unsupported weights: parameter {name!r} of a {type(module).__name__}"
            f" {why}"
        )


def _why_unsupported(param: torch.nn.Parameter, is_half_already: bool) -> str | None:
    """Say why amp cannot cast or train ``param``, and what to do about it; None if it can."""
    if _torch.is_uninitialized(param):
        return "is uninitialized - its shape must be known - run one forward pass first."
    if param.is_meta:
        return (
            "is on the meta device - masters and loss scales need values - move it with to_empty(device=...), load its"
            " weights, and call amp.initialize then."
        )
    if param.is_inference():
        return "was made under torch.inference_mode - it cannot be trained - make the model outside of it."
    if is_half_already:
        return (
            f"is {param.dtype} already - amp casts the model itself and needs its float32 weights - do not call .half()"
            " or .bfloat16() on it (amp._amp_state.allow_incoming_model_not_fp32 = True lifts this check)."
        )
    return None


# -- optimizers --------------------------------------------------------------------------------------------------------
def as_optimizers(optimizers: object) -> list[AmpOptimizer]:
    """Return ``optimizers`` as a list (None: empty), each checked to be an optimizer or to look like one."""
    wanted = (
        "an optimizer - optimizers must be a torch.optim.Optimizer (or a wrapper with its methods, as LARC), or a list"
        " or tuple of them - pass the optimizer itself."
    )
    given = [] if optimizers is None else as_list(optimizers)
    for optimizer in given:
        if not is_optimizer(optimizer):
            raise _wrong_kind(optimizer, wanted)
    for optimizer in given:
        _refuse_in_block(optimizer)
    return given


def _refuse_in_block(optimizer: Any) -> None:
    stash = getattr(optimizer, "_amp_stash", None)
    if isinstance(stash, OptimizerState) and open_block_of(stash.leaves) is not None:
        raise RuntimeError(
            f"amp.initialize inside a scale_loss block of this {type(optimizer).__name__} - its gradients are still"
            " multiplied by the loss scale - close the block first."
        )


# -- both --------------------------------------------------------------------------------------------------------------
def as_list(given: object) -> list[Any]:
    """Return a list or tuple as a list, and anything else as a list of it alone."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _wrong_kind(given: object, wanted: str) -> TypeError:
    if isinstance(given, type):
        return TypeError(f"amp.initialize got the class {given.__name__} as {wanted}")
    return TypeError(f"amp.initialize got an object of type {type(given).__name__} as {wanted}")


# -- other optimizers, which hold the same tensors ---------------------------------------------------------------------
def check_other_optimizers(models: list[torch.nn.Module], given: list[AmpOptimizer], policy: ModelPolicy) -> None:
    """Check the optimizers under amp that are not ``given``, for ``models`` that are to run under ``policy``."""
    _collect_dropped(models, given)
    _refuse_to_leave_behind(models, given, policy)


def _others_under_amp(given: list[AmpOptimizer]) -> list[AmpOptimizer]:
    """The optimizers under amp that are not ``given``."""
    return [other for other in optimizer_index.listed() if not any(other is optimizer for optimizer in given)]


def _collect_dropped(models: list[torch.nn.Module], given: list[AmpOptimizer]) -> None:
    """Collect optimizers that the script has dropped; their bound methods make them reference cycles.

    Otherwise one that shares tensors with ``models`` or with a ``given`` optimizer would be refused, or gradients of
    these tensors would wait for its step.
    """
    held = _ids_in(models).union(*map(_ids_held_by, given))
    if any(not held.isdisjoint(_ids_held_by(other)) for other in _others_under_amp(given)):
        gc.collect()


def _refuse_to_leave_behind(models: list[torch.nn.Module], given: list[AmpOptimizer], policy: ModelPolicy) -> None:
    """Refuse to change a model's level without an optimizer under amp that holds its tensors.

    Left behind, it would step half weights without masters, masters of float32 weights, or gradients of an unscaled
    loss. Optimizers of sessions with the same policy stay where they are, and keep their loss scale.
    """
    changed = _ids_in(models)
    for optimizer in _others_under_amp(given):
        session = optimizer._amp_stash.session
        if session.policy.steps_like(policy) or changed.isdisjoint(_ids_held_by(optimizer)):
            continue
        before = session.properties.opt_level
        raise RuntimeError(
            f"amp.initialize got a model without its {type(optimizer).__name__}, which an earlier call put under amp at"
            f" {before}, and would {_change_of_level(before, policy.opt_level)} - an optimizer steps weights of the"
            " level that it was initialized at - pass it too, with all of its models, or drop it (del optimizer) before"
            " (D32)."
        )


def _change_of_level(before: str, after: str) -> str:
    """What a call at the level ``after`` does to a model at ``before``; the level of ``enabled=False`` is empty."""
    if not after:
        return "take the model out of amp"
    if after == before:
        return f"put the model at {after} with other options"
    return f"put the model at {after}"


def _ids_in(models: list[torch.nn.Module]) -> set[int]:
    """Ids of the parameters of ``models``."""
    return {id(param) for model in models for part in model.modules() for param in part._parameters.values()}


def _ids_held_by(optimizer: AmpOptimizer) -> set[int]:
    """Ids of the model's tensors that ``optimizer`` holds, or holds the masters of."""
    return {id(model_tensor(param)) for group in optimizer.param_groups for param in group["params"]}
