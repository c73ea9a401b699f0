"""``amp.init``, the API of before 2019: casts without a model, and a handle to scale losses with."""

from __future__ import annotations

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp import casts, session
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.arguments import read_properties
from ampcompat.amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.policy import device_types_of, live_models
from ampcompat.amp.rules import allow_banned as _allow_banned
from ampcompat.amp.scaler import LossScaler

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Cast functions as at O1, knowing no model: on the accelerator that torch reports, else on the CPU.

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
        handle: AmpHandle | NoOpHandle = NoOpHandle()
        _amp_state.handle = handle
        return handle
    properties, half = read_properties("O1", {"loss_scale": loss_scale})
    initialized = session.latest()
    if initialized is not None and initialized.by_init:
        initialized = None
    if initialized is not None:
        half = initialized.half
    made = session.Session(properties, half, None, [LossScaler(properties.loss_scale)])
    made.by_init = True
    _allow_banned(allow_banned)
    device_types = {*device_types_of(live_models()), _torch.accelerator()}
    session.cover_device_types(device_types)
    session.casting_policies().add(made.policy)
    made.cast_inside(live_models())
    casts.set_ambient(made.policy.casts, device_types)
    handle = AmpHandle(made, verbose=verbose)
    if initialized is None:
        state.rooms["latest session"] = made
        _amp_state._values().update(opt_properties=properties, loss_scalers=made.scalers, handle=handle)
    return handle
