"""``initialize``: the one call that puts models and optimizers under amp, and takes them out (``enabled=False``)."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ampcompat import _torch
from ampcompat._log import say, say_once
from ampcompat._state import state
from ampcompat._types import Optimizer, Options, OptLevel
from ampcompat.amp import amp_model, checkpoint, named_masters, nested, optimizer, properties, sharded
from ampcompat.amp.amp_model import ModelPolicy
from ampcompat.amp.autocast import OFF, set_ambient
from ampcompat.amp.checkpoint import load_state_dict, state_dict
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.keep_fp32 import BorderPolicy, select, set_border
from ampcompat.amp.masters import follow_replacements, master_of
from ampcompat.amp.observers import notify
from ampcompat.amp.properties import BRIEFS, LEVELS, Properties
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session, release_casts
from ampcompat.amp.stash import stepper
from ampcompat.amp.weights import cast_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["O0", "O1", "O2", "O3", "O4", "O5", "OptLevel", "Properties", "initialize", "load_state_dict", "opt_levels"]
__all__ += ["state_dict"]

Modules = list[torch.nn.Module]
_Models = TypeVar("_Models", bound=torch.nn.Module | Sequence[torch.nn.Module])
_Given = TypeVar("_Given", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


class _Level:
    """apex's form of a level: an instance fills the ``Properties`` it is called with."""

    name, brief, more = "", "", ""

    def __call__(self, properties: Properties) -> Properties:
        properties._update_options_dict({"enabled": True, "opt_level": self.name, **LEVELS[self.name]})
        return properties


O0, O1, O2, O3, O4, O5 = (type(name, (_Level,), {"name": name, "brief": BRIEFS[name]}) for name in LEVELS)
opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3, O4, O5)}


@overload
def initialize(
    models: _Models, optimizers: None = None, enabled: bool = True, opt_level: OptLevel = "O1", **rest: Unpack[Options]
) -> _Models: ...
@overload
def initialize(
    models: _Models, optimizers: _Given, enabled: bool = True, opt_level: OptLevel = "O1", **rest: Unpack[Options]
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

    The signature is that of ``apex/amp/frontend.py: initialize``; what comes after it is by keyword alone. May be
    called any number of times, for the same or other objects, at any levels: each call owns its models, optimizers and
    scalers; ``amp.state_dict()`` and ``amp._amp_state`` show the latest. apex allowed one call.

    Args:
        models: A ``torch.nn.Module`` with float32 weights, not yet wrapped in DDP or DataParallel; or a list of them.
        optimizers: An optimizer, a list of them (possibly empty), or None.
        enabled: False leaves the objects as plain PyTorch has them, and makes every later call on them a no-op. Objects
            that an earlier call had put under amp are taken out of it: float32 weights with the masters' values, and an
            optimizer that steps them. (apex left the casts in place and stopped scaling.) Any value is taken by its
            truth: public scripts pass the level here, ``initialize(model, optimizer, "O1")``, and a line says which
            level is in force.
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
        patch_torch_functions_type: Of ROCm's fork: the dtype that O1 (``torch.float16``) or O4 (``torch.bfloat16``)
            casts functions to; no other fits.
        keep_fp32: Modules that compute in float32 at any level: a module, a module type, a shell pattern over qualified
            names or class names (``"decoder.*.wo"``), or a list of these. Their inputs are cast to float32; at O2 and
            O3 their weights stay float32 and their outputs go back to half. ``AMPCOMPAT_KEEP_FP32`` adds patterns,
            separated by commas.

    Returns:
        ``models`` and ``optimizers``, as given; with ``optimizers=None`` the models alone.

    Raises:
        RuntimeError: Unknown level, an override that the level does not allow, a half or already wrapped model, a model
            at another level than before without the optimizer that steps it.
        TypeError: Something is not a model, an optimizer or a dtype, or a string in the place of ``enabled`` names
            another level than ``opt_level``.
        ValueError: A flag, scale or count cannot be read. Nothing is changed by a call that raises.
    """
    properties.refuse_other_level(enabled, opt_level)
    kept: Modules = []
    scripted: Modules = []
    changes: list[sharded.Change] = []
    if enabled:
        overrides = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "patch_torch_functions_type": patch_torch_functions_type,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        options, half = properties.read_properties(opt_level, overrides)
        properties.check_keywords(num_losses, min_loss_scale, max_loss_scale, cast_model_outputs, verbosity)
        units = _torch.sharded_units(models)
        found = properties.as_models(models, options.options)
        scripted = [model for model in found if isinstance(model, torch.jit.ScriptModule)]
        modules = [model for model in found if not isinstance(model, torch.jit.ScriptModule)]
        optimizer_list = properties.as_optimizers(optimizers)
        if any(map(_torch.is_zero, optimizer_list)) or any(map(_torch.inner_optimizers, optimizer_list)):
            nested.check(optimizer_list, options)
        if keep_fp32 is not None or "AMPCOMPAT_KEEP_FP32" in os.environ:
            kept = select(found, keep_fp32)
        if _torch.has_shards(modules):
            changes = sharded.plan(units, modules, options.options, kept)
        make = functools.partial(LossScaler, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        scalers = [make(options.options["loss_scale"], loss_id=loss_id) for loss_id in range(num_losses)]
        session = Session(options, half, cast_model_outputs, scalers)
    else:
        modules = _models_under_amp(models)
        optimizer_list = properties.as_optimizers(optimizers)
        session = Session(Properties())
        units = _torch.sharded_units(modules)
        if units:
            changes = sharded.plan(units, modules, session.properties.options)
    if state.optimizers.live:
        _refuse_to_leave(modules, optimizer_list, session.policy)
    if isinstance(enabled, str):
        _say_what_a_string_enables(enabled, session)
    if enabled and verbosity > 0:
        _print_options(session.properties)
    if scripted:
        say("A ScriptModule runs as it was scripted: amp.initialize passed it through without casting it.")
    _take_over(session, modules, optimizer_list, kept, changes)
    if enabled:
        _tell_the_environment()
        named_masters.install()
        state.view["verbosity"] = int(verbosity)
        if state.observers:
            notify("on_initialize")
    return models if optimizers is None else (models, optimizers)


def _tell_the_environment() -> None:
    """Set ``APEX_AMP_ENABLED=1``, as ROCm's fork does, for code that looks there; child processes inherit it."""
    name = "APEX_AMP_ENABLED"
    before = os.environ.get(name)
    if before == "1":
        return
    os.environ[name] = "1"
    if before is None:
        state.undo.callback(os.environ.pop, name, None)
    else:
        state.undo.callback(os.environ.__setitem__, name, before)


def _models_under_amp(models: object) -> Modules:
    """Return the modules in ``models``, and inside of them, that an earlier call has put under amp, each once."""
    given = models if isinstance(models, (list, tuple)) else [models]
    found: dict[torch.nn.Module, None] = {}
    for model in given:
        if isinstance(model, torch.nn.Module):
            for module in _torch.uncompiled(model).modules():
                if module in state.models.live:
                    found[module] = None
    return list(found)


def _say_what_a_string_enables(enabled: str, session: Session) -> None:
    level = session.properties.opt_level
    in_force = f"amp is on, at {level}" if session.enabled else "amp is off"
    say_once(
        f"enabled={enabled!r}",
        f"amp.initialize got {enabled!r} as its third argument, which is enabled - a string is taken by its truth,"
        f" as under apex: {in_force} - pass the level by name, opt_level=...",
    )


def _print_options(options: Properties) -> None:
    """Print what apex printed, for people and scripts that look for it."""
    level = options.opt_level
    say(f"Selected optimization level {BRIEFS[level]}")
    say("Defaults for this optimization level are:")
    for name, value in {"enabled": True, "opt_level": level, **LEVELS[level]}.items():
        say(f"{name:22} : {value}")
    say("After processing overrides, optimization options are:")
    for name, value in options.options.items():
        say(f"{name:22} : {value}")


def _take_over(
    session: Session,
    modules: Modules,
    optimizers: list[Optimizer],
    kept: Modules,
    changes: list[sharded.Change],
) -> None:
    """Change everything that a call changes, or nothing: each change puts its own undo on a stack.

    A session that is not enabled takes models and optimizers out of amp, and leaves alone what is not under it.
    """
    enabled, options, policy = session.enabled, session.properties.options, session.policy
    view = {**state.view, "opt_properties": session.properties, "loss_scalers": session.scalers}
    if enabled or modules or any("_amp_stash" in vars(one) for one in optimizers):
        view["handle"] = AmpHandle(session) if policy.casts.enabled else NoOpHandle()
    with ExitStack() as undo:
        undo.callback(set_ambient, state.casts.ambient or OFF, state.casts.device_types)
        undo.callback(session.end_casts)
        for model in modules:
            undo.callback(amp_model.set_policy, model, model.__dict__.get("_amp_policy"))
        for one in optimizers:
            if "optim" in vars(one):
                nested.gather(one)
        if changes:
            sharded.apply(changes, undo)
        parts = dict.fromkeys(itertools.chain.from_iterable(map(torch.nn.Module.modules, modules)))
        # What this rank steps gets its masters now.
        trained = {id(p) for one in map(stepper, optimizers) for group in one.param_groups for p in group["params"]}
        follow_replacements(parts, trained)
        wide, norms = set().union(*map(torch.nn.Module.modules, kept)), bool(options["keep_batchnorm_fp32"])
        dtype = options["cast_model_type"] or None
        cast_weights(parts, dtype, undo, wide, norms, trained if policy.master_weights else None)
        border = BorderPolicy(policy.opt_level, OFF, torch.float32, policy.half, None, False)
        for part in parts.keys() - modules:
            before = part.__dict__.get("_amp_policy")
            if part in kept or isinstance(before, BorderPolicy):
                undo.callback(set_border, part, before)
                set_border(part, border if part in kept else None)
        for model in modules:
            amp_model.set_policy(model, policy if enabled else None)
        for one in optimizers:
            optimizer.remember(one, undo)
            if enabled:
                optimizer.attach(one, session)
                continue
            if "_amp_stash" in vars(one):
                optimizer.detach(one)
            state.optimizers.disabled[one] = None
        if enabled:
            session.begin_casts()
            if state.loaded_scalers is not None:
                checkpoint.apply(state.loaded_scalers, session.scalers)
                state.loaded_scalers = None
        undo.pop_all()
    state.view, state.session = view, session
    if modules and not enabled:
        release_casts()  # ambient casts stay while other models need them for their losses


def _refuse_to_leave(models: Modules, given: list[Optimizer], policy: ModelPolicy) -> None:
    """Refuse to change a model's level without an optimizer under amp that holds its tensors.

    Left behind, it would step half weights without masters, masters of float32 weights, or gradients of an unscaled
    loss. Optimizers of calls with the same policy stay where they are, and keep their loss scale.
    """
    fit = operator.attrgetter("opt_level", "casts", "half", "master_weights")
    going = {id(param) for model in models for part in model.modules() for param in part._parameters.values()}
    left = weakref.WeakSet[Any](
        one
        for one in state.optimizers.listed()
        if not any(one is other for other in given)
        and fit(one._amp_stash.session.policy) != fit(policy)
        and any(id(m.half if (m := master_of(p)) else p) in going for g in one.param_groups for p in g["params"])
    )
    if left:
        gc.collect()  # an optimizer that is not used any more is part of a cycle: its methods are bound to it
    for one in left:
        before, after = one._amp_stash.session.properties.opt_level, policy.opt_level or "out of amp"
        raise RuntimeError(
            f"amp.initialize got a model without its {type(one).__name__}, which an earlier call put under amp at"
            f" {before}, not {after} - an optimizer steps weights of the level that it was initialized at - pass"
            " it too, with all of its models, or drop it (del optimizer) before (D32)."
        )
