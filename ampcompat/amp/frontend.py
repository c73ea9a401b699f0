"""``initialize``: the one call that puts models and optimizers under amp, and takes them out (``enabled=False``)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, overload

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat.amp import amp_model, checkpoint, nested, optimizer, properties
from ampcompat.amp import keep_fp32 as keep_fp32_
from ampcompat.amp.amp_model import ModelPolicy
from ampcompat.amp.checkpoint import load_state_dict, state_dict
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.observers import notify
from ampcompat.amp.properties import BRIEFS, LEVELS, Optimizer, Properties
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import DISABLED, Session, release_casts
from ampcompat.amp.weights import cast_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "OptLevel",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "state_dict",
]

#: The levels, for annotations: a checker refuses any other string.
OptLevel: TypeAlias = Literal["O0", "O1", "O2", "O3", "O4", "O5"]
_Models = TypeVar("_Models", bound=torch.nn.Module | Sequence[torch.nn.Module])
_Given = TypeVar("_Given", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


class _Options(TypedDict, total=False):
    """The keywords of ``initialize`` after ``opt_level``, for its overloads; the docstring says what they are."""

    cast_model_type: torch.dtype | Literal[False] | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None
    master_weights: bool | None
    loss_scale: float | str | None
    cast_model_outputs: torch.dtype | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float
    keep_fp32: Any


class _Level:
    """apex's form of a level: an instance fills the ``Properties`` it is called with."""

    name, brief, more = "", "", ""

    def __call__(self, properties: Properties) -> Properties:
        properties._update_options_dict({"enabled": True, "opt_level": self.name, **LEVELS[self.name]})
        return properties


O0, O1, O2, O3 = (type(name, (_Level,), {"name": name, "brief": BRIEFS[name]}) for name in ("O0", "O1", "O2", "O3"))
opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3)}


@overload
def initialize(
    models: _Models, optimizers: None = None, enabled: bool = True, opt_level: OptLevel = "O1", **rest: Unpack[_Options]
) -> _Models: ...
@overload
def initialize(
    models: _Models, optimizers: _Given, enabled: bool = True, opt_level: OptLevel = "O1", **rest: Unpack[_Options]
) -> tuple[_Models, _Given]: ...
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
    keep_fp32: object = None,
) -> Any:
    """Put models and optimizers under mixed precision, in place.

    The signature is that of ``apex/amp/frontend.py: initialize``, and ``keep_fp32``. May be called any number of times,
    for the same or other objects, at any levels: each call owns its models, optimizers and scalers;
    ``amp.state_dict()`` and ``amp._amp_state`` show the latest. apex allowed one call.

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
        ``models`` and ``optimizers``, as given; with ``optimizers=None`` the models alone.

    Raises:
        RuntimeError: Unknown level, an override that the level does not allow, a half or already wrapped model, a model
            at another level than before without the optimizer that steps it.
        TypeError: Something is not a model, an optimizer or a dtype, or a string is in the place of ``enabled``.
        ValueError: A flag, scale or count cannot be read. Nothing is changed by a call that raises.
    """
    if isinstance(enabled, str):  # type: ignore[unreachable] # scripts write it
        raise TypeError(
            f"amp.initialize got {enabled!r} as its third argument, which is enabled - it must be True or False - pass"
            f" the level by name: amp.initialize(model, optimizer, opt_level={enabled!r})."
        )
    if not enabled:
        _disable(models, optimizers)
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    options, half = properties.read_properties(opt_level, overrides)
    properties.check_scaling(num_losses, min_loss_scale, max_loss_scale)
    properties.check_outputs(cast_model_outputs)
    loudness = properties.check_verbosity(verbosity)
    model_list, optimizer_list = properties.as_models(models), properties.as_optimizers(optimizers)
    properties.check_unsharded(model_list, options)
    if any(_torch.is_zero(one) or properties.inner_optimizers(one) for one in optimizer_list):
        nested.check(optimizer_list, options)
    bare = [_torch.uncompiled(model) for model in model_list]
    kept: list[torch.nn.Module] = []
    if keep_fp32 is not None or "AMPCOMPAT_KEEP_FP32" in os.environ:
        kept = keep_fp32_.select(bare, keep_fp32)
    scalers = [
        LossScaler(options.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale, loss_id=loss_id)
        for loss_id in range(num_losses)
    ]
    session = Session(options, half, cast_model_outputs, scalers)
    modules = [model for model in bare if not isinstance(model, torch.jit.ScriptModule)]
    _refuse_scripted_parts(modules, session.policy)
    _refuse_to_leave(modules, optimizer_list, session.policy)
    if loudness > 0:
        _describe(options)
    if len(modules) < len(model_list):
        say("A ScriptModule runs as it was scripted: amp.initialize passed it through without casting it.")
    with ExitStack() as undo:
        _take_over(session, modules, optimizer_list, kept, undo)
        undo.pop_all()
    state.view["verbosity"] = loudness
    if state.observers:
        notify("on_initialize")
    return models if optimizers is None else (models, optimizers)


def _take_over(
    session: Session,
    modules: list[torch.nn.Module],
    optimizers: list[Optimizer],
    kept: list[torch.nn.Module],
    undo: ExitStack,
) -> None:
    """Change everything that a call changes; each change puts its own undo on ``undo``."""
    options, policy = session.properties.options, session.policy
    undo.callback(session.undo_casts, state.casts.ambient, state.casts.device_types)
    for model in modules:
        undo.callback(amp_model.set_policy, model, model.__dict__.get("_amp_policy"))
    for one in optimizers:
        if "optim" in vars(one):
            nested.gather(one)
    cast_weights(
        modules,
        policy.input_dtype,
        undo,
        keep_batchnorm_fp32=bool(options["keep_batchnorm_fp32"]),
        master_weights=policy.master_weights,
        trained=optimizer.held_params(optimizers) if policy.master_weights else set(),
        kept=frozenset(inner for module in kept for inner in module.modules()),
    )
    if kept or [m for model in modules for m in model.modules() if "_amp_policy" in vars(m)]:
        keep_fp32_.build_borders(modules, kept, policy, undo)
    for model in modules:
        amp_model.set_policy(model, policy)
    for one in optimizers:
        optimizer.remember(one, undo)
        optimizer.attach(one, session)
    session.begin_casts()
    handle = AmpHandle(session) if policy.casts.enabled else NoOpHandle()
    if state.loaded_scalers is not None:
        checkpoint.apply_loaded(session.scalers, undo)
    _show(session, {"opt_properties": session.properties, "loss_scalers": session.scalers, "handle": handle}, undo)


def _disable(models: object, optimizers: object) -> None:
    """Take models, and models within them, and optimizers out of amp; what is not under amp is left alone."""
    options = Properties()
    given = models if isinstance(models, (list, tuple)) else [models]
    roots = [_torch.uncompiled(model) for model in given if isinstance(model, torch.nn.Module)]
    optimizer_list = properties.as_optimizers(optimizers)
    under = list({id(m): m for root in roots for m in root.modules() if m in state.models.live}.values())
    with_stash = [one for one in optimizer_list if "_amp_stash" in vars(one)]
    _refuse_to_leave(under, optimizer_list, DISABLED.policy)
    with ExitStack() as undo:
        for one in with_stash:
            if "optim" in vars(one):
                nested.gather(one)
        if under:
            keep_fp32_.build_borders(under, [], DISABLED.policy, undo)
            cast_weights(under, None, undo)
        for model in under:
            undo.callback(amp_model.set_policy, model, model.__dict__["_amp_policy"])
            amp_model.detach(model)
        for one in optimizer_list:
            optimizer.remember(one, undo)
            if one in with_stash:
                optimizer.detach(one)
            state.optimizers.disabled.add(one)
        values: dict[str, object] = {"opt_properties": options, "loss_scalers": []}
        if under or with_stash:
            values["handle"] = NoOpHandle()
        _show(Session(options), values, undo)
        undo.pop_all()
    if under:
        release_casts()  # ambient casts stay while other models need them for their losses


def _refuse_to_leave(models: Iterable[torch.nn.Module], given: list[Optimizer], policy: ModelPolicy) -> None:
    """Refuse to change a model's level without an optimizer under amp that holds its tensors.

    Left behind, it would step half weights without masters, masters of float32 weights, or gradients of an unscaled
    loss. Optimizers of calls with the same policy stay where they are, and keep their loss scale.
    """

    def left() -> Iterable[Any]:
        going = {id(param) for model in models for param in model.parameters()}
        for one in list(state.optimizers.live):
            if not any(one is other for other in given) and not one._amp_stash.session.policy.alike(policy):
                one._amp_stash.look_up(one)
                if not going.isdisjoint(map(id, one._amp_stash.leaves())):
                    yield one

    if any(True for _ in left()):
        gc.collect()  # an optimizer that is not used any more is part of a cycle: its methods are bound to it
        for one in left():
            before, after = one._amp_stash.session.properties.opt_level, policy.opt_level or "out of amp"
            raise RuntimeError(
                f"amp.initialize got a model without its {type(one).__name__}, which an earlier call put under amp at"
                f" {before}, not {after} - an optimizer steps weights of the level that it was initialized at - pass"
                " it too, with all of its models, or drop it (del optimizer) before (D32)."
            )


def _refuse_scripted_parts(models: Iterable[torch.nn.Module], policy: ModelPolicy) -> None:
    """Refuse to cast a ScriptModule inside a model: its parameters and hooks belong to TorchScript."""
    for name, part in [named for model in models for named in model.named_modules()]:
        if policy.half is not None and isinstance(part, torch.jit.ScriptModule):
            raise RuntimeError(
                f"amp.initialize got a model with the scripted submodule {name!r} at opt_level={policy.opt_level!r} -"
                " the weights of a ScriptModule cannot be cast in place - script it after amp.initialize, or use"
                " opt_level='O1'."
            )


def _show(session: Session, values: dict[str, object], undo: ExitStack) -> None:
    """Make ``session`` the one that the module-level views show."""
    before, latest = dict(state.view), state.session

    def show_again() -> None:
        state.view.clear()
        state.view.update(before)
        state.session = latest

    undo.callback(show_again)
    state.view.update(values)
    state.session = session


def _describe(properties: Properties) -> None:
    """Print what apex printed, for people and scripts that look for it."""
    level = properties.opt_level
    say(f"Selected optimization level {BRIEFS[level]}")
    say("Defaults for this optimization level are:")
    for name, value in {"enabled": True, "opt_level": level, **LEVELS[level]}.items():
        say(f"{name:22} : {value}")
    say("After processing overrides, optimization options are:")
    for name, value in properties.options.items():
        say(f"{name:22} : {value}")
