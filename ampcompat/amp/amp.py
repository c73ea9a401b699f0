"""``amp.init``, the API of before 2019: casts without a model, and a handle to scale losses with."""

from __future__ import annotations

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.amp_model import device_types_of
from ampcompat.amp.autocast import cover, set_ambient
from ampcompat.amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.properties import read_properties
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session

__all__ = ["float_function", "half_function", "init", "promote_function"]
__all__ += ["register_float_function", "register_half_function", "register_promote_function"]


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Cast functions as at O1, without a model, on the accelerator or else the CPU (``apex/amp/amp.py: init``).

    After ``initialize`` the forwards of its models cast functions too, whatever their level (espnet wants that at O2);
    its scalers and ``_amp_state`` stay what they are.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: Scale of ``handle.scale_loss``.
        enable_caching: Accepted; casts outside a model's forward are not cached.
        verbose: Accepted.
        allow_banned: Let ``binary_cross_entropy`` take half arguments, in float32, instead of refusing.

    Returns:
        The handle: ``scale_loss``, ``wrap_optimizer``, ``is_active``, ``_deactivate``, ...

    Raises:
        ValueError: ``loss_scale`` cannot be read.
    """
    if not enabled:
        _amp_state.handle = nothing = NoOpHandle()
        return nothing
    properties, half = read_properties("O1", {"loss_scale": loss_scale})
    initialized = None if state.session is None or state.session.by_init else state.session
    if initialized is not None:
        half = initialized.half
    made = Session(properties, half, scalers=[LossScaler(properties.loss_scale)], by_init=True)
    state.rules.allow_banned = allow_banned
    device_types = device_types_of(state.models.live) & set(_torch.autocast_device_types()) | {_torch.accelerator()}
    cover(device_types)
    for policy in [model.__dict__["_amp_policy"] for model in state.models.live]:
        if not policy.casts.enabled:  # forwards at other levels cast functions too, into their own half dtype
            made.casting.append(policy)
            policy.casts = policy.casts._replace(enabled=True)
    set_ambient(made.policy.casts, device_types)
    handle = AmpHandle(made)
    if initialized is None:
        state.session = made
        state.view.update(opt_properties=properties, loss_scalers=made.scalers, handle=handle)
    return handle
