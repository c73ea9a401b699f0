"""Own what one call of ``initialize`` made: its options, its scalers, how its models run, and its casts."""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp import cpu_convolution, ddp
from ampcompat.amp.amp_model import ModelPolicy, device_types_of
from ampcompat.amp.autocast import OFF, Casts, cover, set_ambient, uncover
from ampcompat.amp.properties import HALF_DTYPES, Properties
from ampcompat.amp.scaler import LossScaler


class Session:
    """One call of ``initialize``; models lead to its policy, optimizers to it.

    Attributes:
        properties: Its options.
        half: Its half dtype.
        scalers: One loss scaler per ``num_losses``.
        policy: How its models run.
        enabled: False for a call with ``enabled=False``, which owns nothing.
        by_init: Whether ``amp.init`` made it, which knows no models.
        casting: Its policy, and those of other calls that cast functions because this one does.
    """

    def __init__(
        self,
        properties: Properties,
        half: torch.dtype = torch.float16,
        outputs: torch.dtype | None = None,
        scalers: list[LossScaler] | None = None,
        by_init: bool = False,
    ) -> None:
        self.properties, self.half, self.scalers, self.by_init = properties, half, scalers or [], by_init
        options = properties.options
        self.enabled = bool(options["enabled"])
        cast_type = options["cast_model_type"] or None
        weights = cast_type if cast_type in HALF_DTYPES else None
        self.policy = ModelPolicy(
            opt_level=options["opt_level"],
            casts=Casts(True, half) if options["patch_torch_functions"] else OFF._replace(dtype=half),
            input_dtype=cast_type,
            output_dtype=outputs or (torch.float32 if cast_type is not None else None),
            half=weights,
            master_weights=bool(options["master_weights"]) and weights is not None,
        )
        self.casting = [self.policy]

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
