"""``initialize``: the one call that puts models and optimizers under amp."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat.amp import amp_model, arguments, checkpoint, optimizer
from ampcompat.amp import keep_fp32 as keep_fp32_
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.cast_model import cast_weights
from ampcompat.amp.casts import cast_state
from ampcompat.amp.checkpoint import load_state_dict, state_dict
from ampcompat.amp.disable import Taken, modules_in, release, take_out
from ampcompat.amp.followers import followers
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.policy import live_models
from ampcompat.amp.properties import BRIEFS, LEVELS, Properties
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session

__all__ = ["Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]

opt_levels = LEVELS


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    keep_fp32: Any = None,
) -> Any:
    """Put models and optimizers under mixed precision, in place; the signature is apex's, and ``keep_fp32``.

    May be called any number of times, for the same or other objects, at any levels: each call owns its models,
    optimizers and scalers; ``amp.state_dict()`` and ``amp._amp_state`` show the latest. A model that changes its level
    takes the optimizers along that an earlier call was given with it.

    Args:
        models: A ``torch.nn.Module`` with float32 weights, not yet wrapped in DDP or DataParallel; or a list of them.
        optimizers: An optimizer, a list of them (possibly empty), or None.
        enabled: False leaves the objects as plain PyTorch has them, and makes every later call on them a no-op. Objects
            that an earlier call had put under amp are taken out of it: float32 weights with the masters' values, and an
            optimizer that steps them. (apex left the casts in place and stopped scaling.)
        opt_level: ``"O0"`` to ``"O3"`` as in apex, ``"O4"`` (O1 in bfloat16) or ``"O5"`` (O2 in bfloat16).
        cast_model_type: Dtype of weights and inputs; False for no cast.
        patch_torch_functions: Cast functions by lists (O1's own).
        keep_batchnorm_fp32: Affine batch norm stays float32; True, False or these as strings.
        master_weights: Optimizers step float32 masters of half weights.
        loss_scale: ``"dynamic"``, or a number (or a number as a string) for a static scale.
        cast_model_outputs: Dtype that floating outputs of ``forward`` are cast to.
        num_losses: How many loss scalers; ``scale_loss`` chooses one by ``loss_id``.
        verbosity: 0 prints nothing.
        min_loss_scale: Floor of dynamic scales; None means 2^-24.
        max_loss_scale: Cap of dynamic scales, the initial one (2^16) included.
        keep_fp32: Modules that compute in float32 at any level: a module, a module type, a shell pattern over qualified
            names or class names (``"decoder.*.wo"``), or a list of these. Their inputs are cast to float32; at O2 and
            O3 their weights stay float32 and their outputs go back to half. ``AMPCOMPAT_KEEP_FP32`` adds patterns,
            separated by commas.

    Returns:
        The model (or the list of models), and the optimizer (or list), as given; with ``optimizers=None`` the model(s)
        alone.

    Raises:
        RuntimeError: Unknown level, an override that the level does not allow, a half or already wrapped model.
        TypeError: Something is not a model, an optimizer or a dtype.
        ValueError: A flag, scale or count cannot be read. Nothing is changed by a call that raises.
    """
    if not enabled:
        _disable(models, optimizers)
        return models if optimizers is None else (models, optimizers)
    properties, half = arguments.read_properties(
        opt_level,
        {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        },
    )
    arguments.check_scaling(num_losses, min_loss_scale, max_loss_scale)
    arguments.check_outputs(cast_model_outputs)
    loudness = arguments.check_verbosity(verbosity)
    model_list, optimizer_list = arguments.as_models(models), arguments.as_optimizers(optimizers)
    arguments.check_unsharded(model_list, properties)
    kept = keep_fp32_.select([_torch.uncompiled(model) for model in model_list], keep_fp32)
    scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale, loss_id=loss_id)
        for loss_id in range(num_losses)
    ]
    session = Session(properties, half, cast_model_outputs, scalers)
    following = arguments.as_optimizers(followers(_plain_modules(model_list), optimizer_list, session.policy))
    with ExitStack() as undo:
        _keep_shown(undo)
        _amp_state.verbosity = loudness
        if loudness > 0:
            _describe(properties)
        _take_over(session, model_list, [*optimizer_list, *following], kept, undo)
        undo.pop_all()
    if "AMPCOMPAT_EXPLAIN" in os.environ:
        from ampcompat.explain import explain_as_asked

        explain_as_asked()
    shown: Any = model_list if isinstance(models, (list, tuple)) else models
    if optimizers is None:
        return shown
    return shown, optimizer_list if isinstance(optimizers, (list, tuple)) else optimizers


def _take_over(
    session: Session,
    models: list[torch.nn.Module],
    optimizers: list[Any],
    kept: list[torch.nn.Module],
    undo: ExitStack,
) -> None:
    """Change everything that a call changes; each change puts its own undo on ``undo``."""
    properties, policy = session.properties, session.policy
    modules = _plain_modules(models)
    if len(modules) < len(models):
        say("A ScriptModule runs as it was scripted: amp.initialize passed it through without casting it.")
    room = cast_state()
    undo.callback(session.undo_casts, room.ambient, room.device_types)
    for model in modules:
        undo.callback(amp_model.put_back, amp_model.remember(model))
    if policy.input_dtype is not None:
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        cast_weights(
            modules,
            policy.input_dtype,
            bool(properties.keep_batchnorm_fp32),
            policy.master_weights,
            trained if policy.master_weights else set(),
            undo,
            frozenset(inner for module in kept for inner in module.modules()),
        )
    else:
        cast_weights(modules, None, False, False, set(), undo)
    keep_fp32_.build_borders(modules, kept, policy, undo)
    for model in modules:
        amp_model.attach(model, policy)
    for one in optimizers:
        undo.callback(optimizer.put_back, optimizer.remember(one))
        optimizer.attach(one, session)
    session.begin_casts(live_models())
    handle = AmpHandle(session) if policy.casts.enabled else NoOpHandle()
    checkpoint.apply_pending(session.scalers, undo)
    _show({"opt_properties": properties, "loss_scalers": session.scalers, "handle": handle}, session)


def _plain_modules(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """What is to be cast of ``models``: what is behind compiled ones, and no ScriptModule."""
    found = [_torch.uncompiled(model) for model in models]
    return [model for model in found if not isinstance(model, torch.jit.ScriptModule)]


def _show(values: dict[str, Any], session: Session | None) -> None:
    """Make ``session`` the one that the module-level views show."""
    _amp_state._values().update(values)
    state.rooms["latest session"] = session


def _keep_shown(undo: ExitStack) -> None:
    """Have ``undo`` show again what is shown now."""
    values, latest = dict(_amp_state._values()), state.rooms.get("latest session")

    def show_again() -> None:
        _amp_state._values().clear()
        _show(values, latest)

    undo.callback(show_again)


def _disable(models: Any, optimizers: Any) -> None:
    properties = Properties()
    session = Session(properties, torch.float16, None, [])
    optimizer_list = arguments.as_optimizers(optimizers)
    roots = modules_in(models)
    optimizer_list += arguments.as_optimizers(followers(roots, optimizer_list, session.policy))
    values: dict[str, Any] = {"opt_properties": properties, "loss_scalers": []}
    disabled = _torch.disabled_optimizers(state)
    taken: Taken | None = None
    try:
        with ExitStack() as undo:
            _keep_shown(undo)
            out = take_out(roots, optimizer_list, undo)
            if out.anything:
                values["handle"] = NoOpHandle()
            for one in optimizer_list:
                if one not in disabled:
                    undo.callback(disabled.discard, one)
                    disabled.add(one)
            _show(values, session)
            taken = out
            undo.pop_all()
        release(taken)
    except BaseException:
        if taken is not None:
            release(taken)
        raise


def _describe(properties: Properties) -> None:
    """What apex printed, for the eyes and scripts that look for it."""
    level = properties.opt_level
    say(f"Selected optimization level {BRIEFS[level]}")
    say("Defaults for this optimization level are:")
    for name, value in {"enabled": True, "opt_level": level, **LEVELS[level]}.items():
        say(f"{name:22} : {value}")
    say("After processing overrides, optimization options are:")
    for name, value in properties.options.items():
        say(f"{name:22} : {value}")
