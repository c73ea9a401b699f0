"""``amp.init``, the API of before 2019; and the home of names that scripts import from ``apex.amp.amp``.

``init`` casts functions without a model, and returns a handle to scale losses with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from ampcompat._types import HALF_DTYPES
from ampcompat.amp._amp_state import _amp_state, view_state
from ampcompat.amp.casts.registration import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampcompat.amp.casts.rules import op_rules
from ampcompat.amp.frontend import initialize, load_state_dict, state_dict
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.levels import casting_level
from ampcompat.amp.properties import read_properties
from ampcompat.amp.scaling.optimizer_state import scalers_shown
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session, session_state
from ampcompat.amp.session_casts import begin_casts_of_init

__all__ = ["bfloat16_function", "float_function", "half_function", "init", "promote_function"]
__all__ += ["register_bfloat16_function", "register_float_function", "register_half_function"]
__all__ += ["register_promote_function"]
__all__ += ["initialize", "load_state_dict", "state_dict"]

P = ParamSpec("P")


def __getattr__(name: str) -> object:
    if name == "_DECORATOR_HANDLE":  # the handle in force, or None
        return getattr(_amp_state, "handle", None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _rocm_order(init: Callable[P, AmpHandle]) -> Callable[P, AmpHandle]:
    """Wrap ``init`` to take a dtype as its third argument for ``patch_type``, which ROCm's fork has there."""

    @functools.wraps(init)
    def either_order(*args: Any, **kwargs: Any) -> AmpHandle:
        if len(args) > 2 and isinstance(args[2], torch.dtype):
            enabled, loss_scale, patch_type, *rest = args
            return init(enabled, loss_scale, *rest, patch_type=patch_type, **kwargs)
        return init(*args, **kwargs)

    return either_order


@_rocm_order
def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool | torch.dtype = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype | None = None,
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
        patch_type: ``torch.float16`` or ``torch.bfloat16``, the dtype of code outside of initialized models; None is
            the half dtype of the latest ``initialize``, or float16 before the first. ROCm's fork has this argument
            third, before ``enable_caching``: a dtype in that place is taken for it.

    Returns:
        The handle: ``scale_loss``, ``wrap_optimizer``, ``is_active``, ``_deactivate``, ...

    Raises:
        ValueError: ``loss_scale`` cannot be read.
        RuntimeError: ``patch_type`` is neither of the two.
    """
    if patch_type not in (None, *HALF_DTYPES):
        halves = " or ".join(map(str, HALF_DTYPES))
        raise RuntimeError(
            f"amp.init got patch_type={patch_type!r} - functions are cast to {halves} - pass one of these."
        )
    if not enabled:
        no_op = NoOpHandle()
        _amp_state.handle = no_op
        return no_op
    level = casting_level(patch_type or torch.float16)
    properties, half_dtype = read_properties(level, {"loss_scale": loss_scale})
    latest = session_state.latest
    follows_initialize = latest is not None and not latest.by_init
    if latest is not None and follows_initialize and patch_type is None:
        half_dtype = latest.half_dtype
    session = Session(properties, half_dtype, scalers=[LossScaler(properties.loss_scale)], by_init=True)
    op_rules.allow_banned = allow_banned
    begin_casts_of_init(session)
    handle = AmpHandle(session)
    if not follows_initialize:
        session_state.latest = session
        view_state.find_scalers = scalers_shown
        view_state.view.update(opt_properties=properties, handle=handle)
    return handle
