"""One call of ``initialize``: its options and scalers, and the way from its models and optimizers back to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat._undo import on_undo
from ampcompat.amp import casts, choke_points, cpu_convolution, ddp, functions, rules
from ampcompat.amp.casts import OFF, Casts
from ampcompat.amp.policy import ModelPolicy, all_device_types_of, device_types_of, live_models
from ampcompat.amp.properties import Properties
from ampcompat.amp.scaler import LossScaler


class Session:
    """What one ``initialize`` call owns.

    Attributes:
        properties: Its options.
        scalers: One loss scaler per ``num_losses``.
        policy: How its models run.
        half: Its half dtype.
        enabled: False for a call with ``enabled=False``, which owns nothing.
        by_init: Whether ``amp.init`` made it, which knows no models.
        lent: Policies of other calls that cast functions because this one does.
    """

    def __init__(
        self, properties: Properties, half: torch.dtype, outputs: torch.dtype | None, scalers: list[LossScaler]
    ) -> None:
        self.properties, self.half, self.scalers = properties, half, scalers
        self.enabled = bool(properties.enabled)
        self.by_init = False
        self.lent: list[ModelPolicy] = []
        cast_type = properties.cast_model_type or None
        weights = cast_type if cast_type in (torch.float16, torch.bfloat16) else None
        self.policy = ModelPolicy(
            opt_level=properties.opt_level,
            casts=Casts(True, half) if properties.patch_torch_functions else OFF._replace(dtype=half),
            input_dtype=cast_type,
            output_dtype=outputs or (torch.float32 if cast_type is not None else None),
            half=weights,
            master_weights=bool(properties.master_weights) and weights is not None,
        )

    @property
    def dynamic(self) -> bool:
        """Whether any of its scalers moves."""
        return any(scaler.dynamic for scaler in self.scalers)

    @property
    def plain(self) -> bool:
        """Whether blocks have nothing to do: scale one for ever, no masters."""
        return not self.policy.master_weights and all([scaler.is_one for scaler in self.scalers])  # noqa: C419 - faster

    def new_scaler(self) -> LossScaler:
        """One more scaler like the first."""
        return LossScaler(self.properties.loss_scale, loss_id=len(self.scalers))

    def replace_scalers(self, scalers: Any) -> None:
        """Follow ``amp._amp_state.loss_scalers = [...]``."""
        found = scalers if isinstance(scalers, list) else []
        if not found or not all(isinstance(scaler, LossScaler) for scaler in found):
            raise TypeError(
                f"amp._amp_state.loss_scalers = {scalers!r} - it must be a list of amp.scaler.LossScaler - put"
                " amp.scaler.LossScaler(scale) or LossScaler('dynamic') into it, one per loss."
            )
        self.scalers = found

    def home_of(self, param: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """The module that holds ``param``, and its name there."""
        for model in live_models():
            for module in model.modules():
                for name, tensor in module._parameters.items():
                    if tensor is param:
                        return module, name
        return None

    def begin_casts(self, models: Iterable[torch.nn.Module]) -> None:
        """Make this call's casts the ambient ones, on the devices of every live model."""
        ddp.install()
        models = {*live_models(), *models}
        device_types = device_types_of(models)
        if self.policy.casts.enabled:
            _warn_where_nothing_is_cast(all_device_types_of(models) - device_types, self.properties.opt_level)
            cover_device_types(device_types)
            casting_policies().add(self.policy)
        elif self.policy.half is not None and "cpu" in device_types:
            cpu_convolution.acquire()
        casts.set_ambient(self.policy.casts, device_types)

    def cast_inside(self, models: Iterable[torch.nn.Module]) -> None:
        """Have the forwards of ``models`` cast functions too, into their own half dtype, whatever their level."""
        for model in models:
            policy: ModelPolicy | None = model.__dict__.get("_amp_policy")
            if policy is not None and not policy.casts.enabled:
                self.lent.append(policy)
                policy.casts = policy.casts._replace(enabled=True)
                casting_policies().add(policy)

    def end_casts(self) -> None:
        """Take this call's casts back (``handle._deactivate()``); with the last of them go all patches of torch."""
        for policy in (self.policy, *self.lent):
            if policy.casts.enabled:
                policy.casts = policy.casts._replace(enabled=False)
                casting_policies().discard(policy)
        release_casts()

    def undo_casts(self, ambient: Casts, device_types: Iterable[str]) -> None:
        """Undo :meth:`begin_casts`, done whole or in part, back to ``ambient`` on ``device_types``."""
        if ambient.enabled:
            self.policy.casts = self.policy.casts._replace(enabled=False)
            casting_policies().discard(self.policy)
        else:
            self.end_casts()
        casts.set_ambient(ambient, device_types)


def _warn_where_nothing_is_cast(device_types: Iterable[str], opt_level: str | None) -> None:
    for device_type in device_types:
        warn_once(
            f"no autocast on {device_type}",
            f"amp.initialize got opt_level={opt_level!r} and a model on the device type {device_type!r}, which this"
            " torch cannot autocast - no function is cast there, and it trains in float32 - use opt_level='O2' (O5 for"
            " bfloat16), which casts the model.",
        )


def casting_policies() -> weakref.WeakSet[ModelPolicy]:
    """Policies in use that cast functions."""
    policies: weakref.WeakSet[ModelPolicy] = state.room("casting policies", _make_casting_policies)
    return policies


def _make_casting_policies() -> weakref.WeakSet[ModelPolicy]:
    policies: weakref.WeakSet[ModelPolicy] = weakref.WeakSet()

    def stop() -> None:
        for policy in policies:
            policy.casts = policy.casts._replace(enabled=False)

    on_undo(state.undo, stop)
    return policies


def release_casts() -> None:
    """Take all patches off torch if nothing casts any more."""
    if not any(policy.casts.enabled for policy in casting_policies()):
        casts.end_ambience()
        choke_points.remove()
        rules.release()
        functions.deactivate()
        if not any(getattr(model, "_amp_policy", DISABLED.policy).half for model in live_models()):
            cpu_convolution.release()


def cover_device_types(device_types: Iterable[str]) -> None:
    """Have everything that casting needs in place for ``device_types``."""
    device_types = list(device_types)
    choke_points.install()
    rules.acquire(device_types)
    functions.activate()
    if "cpu" in device_types:
        cpu_convolution.acquire()


#: Owner of optimizers that were initialized with ``enabled=False``, when a later call is enabled.
DISABLED = Session(Properties(), torch.float16, None, [])


def latest() -> Session | None:
    """The session of the latest ``initialize``, disabled ones included."""
    session: Session | None = state.rooms.get("latest session")
    return session
