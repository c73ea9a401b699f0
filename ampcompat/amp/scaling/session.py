"""What one ``initialize`` call owns: its options, its scalers, how its models run, and its casts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts import cpu_convolution
from ampcompat.amp.casts.ambience import (
    install_casting,
    policies_in_force,
    sessions_in_force,
    set_ambient,
    switch_this_forward,
    uninstall_casting,
)
from ampcompat.amp.casts.contexts import Casts
from ampcompat.amp.half.devices import device_types_of
from ampcompat.amp.half.forward import ModelPolicy
from ampcompat.amp.properties import Properties
from ampcompat.amp.scaling.scaler import LossScaler, check_scaler


@dataclass(eq=False, repr=False)
class Session:
    """One call of ``initialize`` (or of ``amp.init``, which is given no models); optimizers lead to it.

    Attributes:
        properties: The options in force.
        half_dtype: What functions or weights are cast to.
        cast_outputs: The keyword ``cast_model_outputs``.
        scalers: One per ``num_losses``.
        by_init: Whether ``amp.init`` made it.
        has_models: Whether it was given models: its casts outside of them end with the last of these.
        steps: Of all its optimizers, skipped ones included.
        has_scaled: Whether its blocks may have given tensors of its optimizers scaled gradients: a loss was multiplied
            by a scale that is not always one. The call takes this over from earlier calls with the same models.
        enabled: False of ``initialize(enabled=False)``, which owns nothing.
        policy: How its models run.
        casting: Its policy, and the policies of other calls that cast functions because this one does.
        device_types: Where its casts are in force.
    """

    properties: Properties
    half_dtype: torch.dtype = torch.float16
    cast_outputs: torch.dtype | None = None
    scalers: list[LossScaler] = field(default_factory=list)
    by_init: bool = False
    has_models: bool = False
    steps: int = 0
    has_scaled: bool = False
    enabled: bool = field(init=False)
    policy: ModelPolicy = field(init=False)
    casting: list[ModelPolicy] = field(init=False)
    device_types: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.enabled = bool(self.properties.options["enabled"])
        self.policy = self._make_policy()
        self.casting = [self.policy]

    def _make_policy(self) -> ModelPolicy:
        options = self.properties.options
        model_dtype = options["cast_model_type"] or None  # False: no cast
        weights_dtype = model_dtype if model_dtype in HALF_DTYPES else None
        output_dtype = self.cast_outputs
        if output_dtype is None and model_dtype is not None:
            output_dtype = torch.float32
        return ModelPolicy(
            opt_level=options["opt_level"],
            casts=Casts(bool(options["patch_torch_functions"]), self.half_dtype),
            input_dtype=model_dtype,
            output_dtype=output_dtype,
            master_weights=bool(options["master_weights"]) and weights_dtype is not None,
        )

    def replace_scalers(self, scalers: Any) -> None:
        """Follow ``amp._amp_state.loss_scalers = [...]``."""
        if not isinstance(scalers, list) or not scalers:
            raise TypeError(
                f"amp._amp_state.loss_scalers = {scalers!r} - it must be a list of amp.scaler.LossScaler - put"
                " amp.scaler.LossScaler(scale) or LossScaler('dynamic') into it, one per loss."
            )
        for index, scaler in enumerate(scalers):
            check_scaler(scaler, index)
        self.scalers = scalers

    def begin_casts(self) -> None:
        """Make this call's casts, if it has any, the ambient ones, on the devices of every live model."""
        held = device_types_of(state.models.live)
        if state.models.live and not held:  # models without tensors alone: they compute where their inputs are
            held = {_torch.accelerator(), "cpu"}
        self.device_types = held & set(_torch.autocast_device_types())
        if self.policy.casts.enabled:
            for device_type in held - self.device_types:
                self._warn_of_no_autocast(device_type)
            install_casting(self.device_types)
            self.has_models = self.policy in policies_in_force()
            self.come_into_force()
        elif self.policy.half_dtype is not None and "cpu" in self.device_types:
            cpu_convolution.acquire()
        release_casts()
        of_init = [session.device_types for session in state.casts.sessions if not session.has_models]
        set_ambient(self.device_types.union(*of_init))

    def come_into_force(self) -> None:
        """Make this the latest of the calls that cast functions, and forget those whose models are gone."""
        state.casts.sessions = [*(other for other in sessions_in_force() if other is not self), self]

    def _warn_of_no_autocast(self, device_type: str) -> None:
        warn_once(
            f"no autocast on {device_type}",
            f"amp.initialize got opt_level={self.properties.opt_level!r} and a model on the device type"
            f" {device_type!r}, which this torch cannot autocast - no function is cast there, and it trains in"
            " float32 - use opt_level='O2' (O5 for bfloat16), which casts the model.",
        )

    def switch_casts(self, on: bool) -> None:
        """Switch this call's casts off, or on again; a forward that this thread is in the middle of follows at once.

        Ambient casts follow. Patches of torch stay, so that switching is cheap.
        """
        for policy in self.casting:
            policy.casts = policy.casts._replace(enabled=on)
        if state.session is None:  # reset since
            return
        if on:
            install_casting(self.device_types)
            self.come_into_force()
        set_ambient(self.device_types.union(state.casts.device_types))
        switch_this_forward(on)

    def end_casts(self) -> None:
        """Take this call's casts back (``handle._deactivate()``); with the last of them go all patches of torch."""
        for policy in self.casting:
            policy.casts = policy.casts._replace(enabled=False)
        release_casts()


def release_casts() -> None:
    """Take all patches off torch if no model and no ``amp.init`` casts functions any more."""
    policies = [*policies_in_force(), *(session.policy for session in sessions_in_force())]
    if not any(policy.casts.enabled for policy in policies):
        uninstall_casting()


#: Owner of optimizers that were initialized with ``enabled=False``, when a later call is enabled.
DISABLED = Session(Properties())
