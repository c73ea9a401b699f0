"""Own what one call of ``initialize`` made: its options, its scalers, how its models run, and its casts."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp import cpu_convolution, ddp
from ampcompat.amp.amp_model import ModelPolicy, device_types_of
from ampcompat.amp.autocast import Casts, cover, set_ambient, uncover
from ampcompat.amp.properties import HALF_DTYPES, Properties
from ampcompat.amp.scaler import LossScaler


@dataclass(eq=False, repr=False)
class Session:
    """One call of ``initialize`` (or of ``amp.init``, which knows no models); optimizers lead to it."""

    properties: Properties
    half: torch.dtype = torch.float16
    outputs: InitVar[torch.dtype | None] = None
    scalers: list[LossScaler] = field(default_factory=list)  # one per ``num_losses``
    by_init: bool = False
    steps: int = 0  # of all its optimizers, skipped ones included

    def __post_init__(self, outputs: torch.dtype | None) -> None:
        options = self.properties.options
        self.enabled = bool(options["enabled"])  # else it owns nothing
        cast_type = options["cast_model_type"] or None
        weights = cast_type if cast_type in HALF_DTYPES else None
        self.policy = ModelPolicy(  # how its models run
            opt_level=options["opt_level"],
            casts=Casts(bool(options["patch_torch_functions"]), self.half),
            input_dtype=cast_type,
            output_dtype=outputs or (torch.float32 if cast_type is not None else None),
            half=weights,
            master_weights=bool(options["master_weights"]) and weights is not None,
        )
        self.casting = [self.policy]  # and those of other calls that cast functions because this one does

    def replace_scalers(self, scalers: Any) -> None:
        """Follow ``amp._amp_state.loss_scalers = [...]``."""
        found = scalers if isinstance(scalers, list) else []
        if not found or not all(isinstance(scaler, LossScaler) for scaler in found):
            raise TypeError(
                f"amp._amp_state.loss_scalers = {scalers!r} - it must be a list of amp.scaler.LossScaler - put"
                " amp.scaler.LossScaler(scale) or LossScaler('dynamic') into it, one per loss."
            )
        self.scalers = found

    def begin_casts(self) -> None:
        """Make this call's casts the ambient ones, on the devices of every live model."""
        ddp.install()
        held = device_types_of(state.models.live)
        if "cpu" in held:
            _torch.keep_freed_memory()
        known = held & set(_torch.autocast_device_types())
        if self.policy.casts.enabled:
            for device_type in held - known:
                warn_once(
                    f"no autocast on {device_type}",
                    f"amp.initialize got opt_level={self.properties.opt_level!r} and a model on the device type"
                    f" {device_type!r}, which this torch cannot autocast - no function is cast there, and it trains in"
                    " float32 - use opt_level='O2' (O5 for bfloat16), which casts the model.",
                )
            cover(known)
        elif self.policy.half is not None and "cpu" in known:
            cpu_convolution.acquire()
        set_ambient(self.policy.casts, known)

    def end_casts(self) -> None:
        """Take this call's casts back (``handle._deactivate()``); with the last of them go all patches of torch."""
        for policy in self.casting:
            policy.casts = policy.casts._replace(enabled=False)
        release_casts()


def release_casts() -> None:
    """Take all patches off torch if no model and no ``amp.init`` casts functions any more."""
    policies = [model.__dict__["_amp_policy"] for model in state.models.live]
    if state.session is not None:
        policies.append(state.session.policy)
    if not any(policy.casts.enabled for policy in policies):
        uncover()


#: Owner of optimizers that were initialized with ``enabled=False``, when a later call is enabled.
DISABLED = Session(Properties())
