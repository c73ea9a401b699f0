"""The models and optimizers of one session: put under amp, or with ``enabled=False`` taken out of it.

All checks have been made before. What fails here (memory runs out) leaves objects half way. The same call of
``initialize``, made again, completes them: each change is idempotent. Optimizers of other sessions stay as they are,
but casting reads what they hold: they may train a model of this session, which then needs masters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompat.amp._amp_state import view_state
from ampcompat.amp._process_optimizer import AmpOptimizerState
from ampcompat.amp.adapters import checkpoint_names, ddp, fsdp, wrapped
from ampcompat.amp.half.boundary import BoundaryPolicy, set_boundary
from ampcompat.amp.half.casting import cast_weights
from ampcompat.amp.half.model_class import set_policy
from ampcompat.amp.half.torch_events import watch_writes
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.misuse import watch_more
from ampcompat.amp.scaling import checkpoint
from ampcompat.amp.scaling.clearing import watch_modules
from ampcompat.amp.scaling.groups import follow_groups
from ampcompat.amp.scaling.optimizer import attach, detach
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, optimizer_index, scalers_shown
from ampcompat.amp.scaling.session import Session, session_state
from ampcompat.amp.session_casts import begin_casts, renew_ambient_casts


@dataclass
class Objects:
    """What a call of ``initialize`` changes, checked.

    Attributes:
        models: The models that amp can change: no ScriptModules.
        optimizers: As given, in a list.
        kept: Modules in ``models`` that stay float32.
        shard_changes: What becomes of units of ``fully_shard`` in ``models``.
        has_scripted: Whether there were ScriptModules among the models.
    """

    models: list[torch.nn.Module]
    optimizers: list[AmpOptimizer]
    kept: list[torch.nn.Module] = field(default_factory=list)
    shard_changes: list[fsdp.Change] = field(default_factory=list)
    has_scripted: bool = False


def take_over(session: Session, objects: Objects) -> None:
    """Put ``objects`` under ``session``; if it is not enabled, take them out of amp."""
    if objects.shard_changes:
        fsdp.apply(objects.shard_changes)
    _cast_models(session, objects)
    for model in objects.models:
        set_policy(model, session.policy if session.enabled else None)
    view = _view_of(session, objects)
    for optimizer in objects.optimizers:
        if session.enabled:
            wrapped.wrap(optimizer)
            attach(optimizer, session, AmpOptimizerState)
        else:
            _release_optimizer(optimizer)
    follow_groups(looks_at_all=True)
    if session.enabled:
        begin_casts(session)
        _watch_torch(session)
    view_state.view = view
    session_state.latest = session
    view_state.find_scalers = scalers_shown
    if session.enabled:
        checkpoint.restore_after_initialize()
    else:
        renew_ambient_casts()


def _watch_torch(session: Session) -> None:
    """Let torch tell amp what it does to models, masters and gradients, and watch the script's first blocks."""
    ddp.install()
    watch_modules()
    has_masters = session.policy.master_weights
    if has_masters:
        watch_writes()
        checkpoint_names.install()
    scales = not all(scaler.is_one for scaler in session.scalers)
    if has_masters or scales:
        watch_more(len(session.scalers))


def _view_of(session: Session, objects: Objects) -> dict[str, Any]:
    """Return what ``amp._amp_state`` shows once ``session`` is in force."""
    view = {**view_state.view, "opt_properties": session.properties}
    takes_out = bool(objects.models) or any("_amp_stash" in vars(optimizer) for optimizer in objects.optimizers)
    if session.enabled or takes_out:
        view["handle"] = AmpHandle(session) if session.policy.casts.enabled else NoOpHandle()
    return view


def _cast_models(session: Session, objects: Objects) -> None:
    """Cast the weights of all models, or restore them, and put boundaries around what is kept in float32."""
    options = session.properties.options
    policy = session.policy
    parts = list(dict.fromkeys(part for model in objects.models for part in model.modules()))
    optimizers = [*objects.optimizers, *optimizer_index.listed()]  # one of an earlier session may train this model, too
    cast_weights(
        parts,
        options["cast_model_type"] or None,
        keep_fp32={part for module in objects.kept for part in module.modules()},
        keep_batchnorm_fp32=bool(options["keep_batchnorm_fp32"]),
        has_masters=policy.master_weights,
        trained=_ids_of_params(optimizers) if policy.master_weights else set(),
    )
    boundary = BoundaryPolicy.for_modules_of(policy)
    for part in parts:
        if part in objects.models:
            continue
        if part in objects.kept:
            set_boundary(part, boundary)
        elif isinstance(part.__dict__.get("_amp_policy"), BoundaryPolicy):  # of an earlier session
            set_boundary(part, None)


def _ids_of_params(optimizers: list[AmpOptimizer]) -> set[int]:
    """Ids of what ``optimizers`` hold."""
    return {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}


def _release_optimizer(optimizer: AmpOptimizer) -> None:
    """Take ``optimizer`` out of amp, if it is under it; ``scale_loss`` does nothing with it from now on."""
    if "_amp_stash" in vars(optimizer):
        detach(optimizer)
    optimizer_index.disabled[optimizer] = None
