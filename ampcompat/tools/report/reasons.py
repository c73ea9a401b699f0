"""Say why a product of the forward was not half."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from ampcompat._state import state
from ampcompat.amp import optimizer
from ampcompat.amp.amp_model import ModelPolicy
from ampcompat.amp.casts import disabled_depth, wrappers


class Called(NamedTuple):
    """A module whose forward is running.

    Attributes:
        name: Qualified, or its class name.
        policy: Of the innermost model that ``initialize`` was given, itself or one around it; None outside of any.
        kept: Whether it or a module around it is kept in float32.
    """

    name: str
    policy: ModelPolicy | None
    kept: bool


OUTSIDE = Called("(outside of modules)", policy=None, kept=False)


def why_not_half(op: OpOverload, called: Called, dtype: torch.dtype, device_type: str) -> str:
    """The reason why a product of the forward, which runs now, is not half.

    Args:
        op: What runs.
        called: The innermost module that runs.
        dtype: Of the product, not half.
        device_type: Where it runs.
    """
    session, thread = state.session, state.casts.thread
    if session is None:
        return "amp.initialize was not called"
    if not session.enabled:
        return "amp.initialize was given enabled=False"
    if dtype == torch.float64:
        return "its inputs are float64"
    if called.kept:
        return "kept in float32"
    by_rule_or_step = _of_stack(sys._getframe(1))
    if by_rule_or_step:
        return by_rule_or_step
    if disabled_depth():
        return "under disable_casts"
    if thread.regions.get(device_type):
        return "in a region of torch.autocast"
    policy = called.policy or session.policy
    if policy.casts.enabled:
        return _why_not_cast(op, device_type)
    if policy.half_dtype is None:
        return f"opt_level {policy.opt_level} is float32 throughout"
    if called.policy is None:
        return "not given to initialize"
    return "its inputs are float32"


def _of_stack(frame: FrameType | None) -> str:
    """The reason that a function on the stack gives: an op rule, a registered function, or an optimizer's step."""
    while frame is not None:
        reason = wrappers.why_float32(frame)
        if reason:
            return reason
        if frame.f_code is optimizer.evaluate.__code__:  # the closure of a step: the script's code
            return ""
        if frame.f_code.co_filename == optimizer.__file__:
            return "in an optimizer step"
        frame = frame.f_back
    return ""


def _why_not_cast(op: OpOverload, device_type: str) -> str:
    """Why autocast did not cast the inputs of ``op``, though functions are cast where it runs.

    Whether autocast is on cannot be asked here: below its kernels torch reports it as off.
    """
    if device_type not in state.casts.device_types:
        return f"no initialized model is on {device_type}"
    if any(argument.is_out for argument in op._schema.arguments):
        return "no cast is made with out="
    return "no cast reached it"
