"""``initialize``: the one call that puts models and optimizers under amp, and takes them out (``enabled=False``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ampcompat import _torch
from ampcompat._log import say, say_once
from ampcompat._types import HALF_DTYPES, Options
from ampcompat.amp import arguments
from ampcompat.amp._amp_state import view_state
from ampcompat.amp.adapters import fsdp, wrapped
from ampcompat.amp.casts.rules import rules_by_name
from ampcompat.amp.half.boundary import BoundaryPolicy
from ampcompat.amp.half.keep_fp32 import select_kept
from ampcompat.amp.levels import LEVELS
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.options import check_keywords
from ampcompat.amp.properties import Properties, read_properties
from ampcompat.amp.scaling.checkpoint import load_state_dict, state_dict
from ampcompat.amp.scaling.optimizer_state import optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session
from ampcompat.amp.session_objects import Objects, take_over

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["O0", "O1", "O2", "O3", "O4", "O5", "Properties", "initialize", "load_state_dict", "opt_levels"]
__all__ += ["state_dict"]

Modules = list[torch.nn.Module]
_Models = TypeVar("_Models", bound=torch.nn.Module | Sequence[torch.nn.Module])
_Given = TypeVar("_Given", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


class _Level:
    """apex's form of a level: an instance fills the ``Properties`` it is called with."""

    name = ""
    brief = ""
    more = ""

    def __call__(self, properties: Properties) -> Properties:
        properties.options.update({"enabled": True, "opt_level": self.name, **LEVELS[self.name].options})
        return properties


_classes = {name: type(name, (_Level,), {"name": name, "brief": row.brief}) for name, row in LEVELS.items()}
# apex's names; the class of a level that apex did not have is in ``opt_levels`` alone.
O0, O1, O2, O3, O4, O5 = (_classes[name] for name in ("O0", "O1", "O2", "O3", "O4", "O5"))
opt_levels = {name: level() for name, level in _classes.items()}


@overload
def initialize(
    models: _Models, optimizers: None = None, enabled: bool = True, opt_level: str = "O1", **rest: Unpack[Options]
) -> _Models: ...
@overload
def initialize(
    models: _Models, optimizers: _Given, enabled: bool = True, opt_level: str = "O1", **rest: Unpack[Options]
) -> tuple[_Models, _Given]: ...
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: Any = True,
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
    patch_torch_functions_type: torch.dtype | None = None,
    keep_fp32: object = None,
) -> Any:
    """Put models and optimizers under mixed precision, in place.

    The signature is apex's (``apex/amp/frontend.py: initialize``); what apex did not have is by keyword alone. May be
    called any number of times, for the same or other objects, at any levels: each call begins a session, which owns its
    models, optimizers and scalers. ``amp._amp_state`` shows the latest session, and the scalers of the latest one that
    has optimizers; ``amp.state_dict()`` has these first, then the scalers of earlier sessions whose optimizers are
    alive. apex allowed one call.

    Args:
        models: A ``torch.nn.Module`` with float32 weights, not yet wrapped in DDP or DataParallel; or a list of them.
        optimizers: An optimizer, a list of them (possibly empty), or None.
        enabled: False leaves the objects as plain PyTorch has them, and makes every later call on them a no-op. Objects
            that were under amp before are taken out of it: weights become float32 with the masters' values, and the
            optimizer steps them. (apex left the casts in place and stopped scaling.) Any value is taken by its truth:
            public scripts pass the level here, ``initialize(model, optimizer, "O1")``, and a line says which level is
            in force.
        opt_level: ``"O0"`` to ``"O3"`` as in apex, ``"O4"`` (O1 in bfloat16) or ``"O5"`` (O2 in bfloat16).
        cast_model_type: Dtype of weights and inputs; False for no cast.
        patch_torch_functions: Cast functions by lists (O1's own).
        keep_batchnorm_fp32: Affine batch norm stays float32; True, False or these as strings.
        master_weights: Optimizers step float32 masters of half weights.
        loss_scale: ``"dynamic"``, or a number (or a number as a string) for a static scale.
        cast_model_outputs: Dtype that floating outputs of ``forward`` are cast to.
        num_losses: How many loss scalers; ``scale_loss`` chooses one by ``loss_id``.
        verbosity: 0 prints neither the options nor skipped steps.
        min_loss_scale: Floor of dynamic scales; None means 2^-24.
        max_loss_scale: Cap of dynamic scales, the initial one (2^16) included.
        patch_torch_functions_type: Of ROCm's fork: the dtype that O1 (``torch.float16``) or O4 (``torch.bfloat16``)
            casts functions to; no other fits.
        keep_fp32: Modules that compute in float32 at any level: a module, a module type, a shell pattern over qualified
            names or class names (``"decoder.*.wo"``), or a list of these. Their inputs are cast to float32; at O2 and
            O3 their weights stay float32, and their outputs go back to half unless all floating inputs were float32.
            ``AMPCOMPAT_KEEP_FP32`` adds patterns, separated by commas.

    Returns:
        ``models`` and ``optimizers``, as given; with ``optimizers=None`` the models alone.

    Raises:
        RuntimeError: Unknown level, an override that the level does not allow, a half or already wrapped model, a model
            at another level than before without the optimizer that steps it.
        TypeError: Something is not a model, an optimizer or a dtype, or a string in the place of ``enabled`` names
            another level than ``opt_level``.
        ValueError: A flag, scale or count cannot be read.

    All of these are raised before anything is changed. What fails later, because memory runs out, is repaired by the
    same call, made again.
    """
    arguments.refuse_other_level(enabled, opt_level)
    if enabled:
        overrides = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "patch_torch_functions_type": patch_torch_functions_type,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        options, half_dtype = read_properties(opt_level, overrides)
        check_keywords(num_losses, min_loss_scale, max_loss_scale, cast_model_outputs, verbosity)
        objects = _check_objects(models, optimizers, keep_fp32, options)
        scalers = [
            LossScaler(
                options.loss_scale, loss_id=loss_id, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
            )
            for loss_id in range(num_losses)
        ]
        session = Session(options, half_dtype, cast_model_outputs, scalers)
        if session.policy.casts.enabled:
            rules_by_name()  # raises for an entry that a script has put on a list of ops
    else:
        session = Session(Properties())
        objects = _objects_under_amp(models, optimizers, session.properties)
    if optimizer_index.live:
        arguments.check_other_optimizers(objects.models, objects.optimizers, session.policy)
    if isinstance(enabled, str):
        _say_what_a_string_enables(enabled, session)
    if enabled and verbosity > 0:
        _print_options(session.properties)
    if objects.has_scripted:
        say("A ScriptModule runs as it was scripted: amp.initialize passed it through without casting it.")
    take_over(session, objects)
    if enabled:
        view_state.view["verbosity"] = int(verbosity)
        if observer_state.observers:
            notify("on_initialize")
    return models if optimizers is None else (models, optimizers)


# -- what a call is given ----------------------------------------------------------------------------------------------
def _check_objects(models: object, optimizers: object, keep_fp32: object, options: Properties) -> Objects:
    """Check what an enabled call is given against ``options``; raises before anything is changed."""
    units = _torch.sharded_units(models)  # first: checks see the shards
    casts_weights = options.cast_model_type in HALF_DTYPES
    given = arguments.as_models(models, options.opt_level, casts_weights)
    modules = [model for model in given if not isinstance(model, torch.jit.ScriptModule)]
    optimizer_list = arguments.as_optimizers(optimizers)
    if any(wrapped.holds_optimizers(optimizer) for optimizer in optimizer_list):
        wrapped.check(optimizer_list, options)
    kept: Modules = []
    if keep_fp32 is not None or "AMPCOMPAT_KEEP_FP32" in os.environ:
        kept = select_kept(given, keep_fp32)
    shard_changes: list[fsdp.Change] = []
    if _torch.has_shards(modules):
        shard_changes = fsdp.plan(units, modules, options.options, kept)
    return Objects(modules, optimizer_list, kept, shard_changes, has_scripted=len(modules) < len(given))


def _objects_under_amp(models: object, optimizers: object, disabled: Properties) -> Objects:
    """Check what a call with ``enabled=False`` is given; return what it takes out of amp."""
    under_amp = _models_under_amp(models)
    units = _torch.sharded_units(under_amp)
    shard_changes = fsdp.plan(units, under_amp, disabled.options)
    return Objects(under_amp, arguments.as_optimizers(optimizers), shard_changes=shard_changes)


def _models_under_amp(models: object) -> Modules:
    """Return the modules in ``models``, and inside of them, that run as models under amp, each once; copies too."""
    under_amp: dict[torch.nn.Module, None] = {}
    for model in arguments.as_list(models):
        if isinstance(model, torch.nn.Module):
            for module in _torch.uncompiled(model).modules():
                policy = module.__dict__.get("_amp_policy")
                if policy is not None and not isinstance(policy, BoundaryPolicy):
                    under_amp[module] = None
    return list(under_amp)


# -- what a call says --------------------------------------------------------------------------------------------------
def _say_what_a_string_enables(enabled: str, session: Session) -> None:
    level = session.properties.opt_level
    in_force = f"amp is on, at {level}" if session.enabled else "amp is off"
    say_once(
        f"enabled={enabled!r}",
        f"amp.initialize got enabled={enabled!r} (its third argument) - a string is taken by its truth, as under apex:"
        f" {in_force} - pass enabled=True or enabled=False, and the level by name, opt_level=...",
    )


def _print_options(options: Properties) -> None:
    """Print what apex printed, for people and scripts that look for it."""
    level = options.opt_level
    say(f"Selected optimization level {LEVELS[level].brief}")
    say("Defaults for this optimization level are:")
    for name, value in {"enabled": True, "opt_level": level, **LEVELS[level].options}.items():
        say(f"{name:22} : {value}")
    say("After processing overrides, optimization options are:")
    for name, value in options.options.items():
        say(f"{name:22} : {value}")
