"""The float list's functions that the dispatcher cannot see whole: Python functions over half-safe-looking ops.

``local_response_norm`` squares its input, ``interpolate(mode="area")`` averages it, the losses here subtract before
they take a logarithm: each would do so in half. ``Tensor.cpu`` is no op at all. They are wrapped where they live, so a
reference taken earlier escapes the cast, as under apex; modules of ``torch.nn`` look them up when called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.nn.functional as F

from ampcompat import _torch

WRAPPED: Final[tuple[tuple[Any, str], ...]] = (
    (torch.Tensor, "cpu"),
    (F, "local_response_norm"),
    (F, "interpolate"),
    (F, "gaussian_nll_loss"),
    (F, "multilabel_soft_margin_loss"),
    (F, "triplet_margin_with_distance_loss"),
)


def in_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its half tensor arguments in float32 wherever casts are on for their device type."""
    device_types = frozenset(_torch.autocast_device_types())

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            device_type = value.device.type
            if device_type in device_types and torch.is_autocast_enabled(device_type):
                return value.float()
        return value

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*[widen(a) for a in args], **{k: widen(v) for k, v in kwargs.items()})

    return wrapper


def install(undo: ExitStack) -> None:
    """Wrap the functions."""
    for owner, name in WRAPPED:
        # Tensor.cpu is inherited: the wrapper shadows it and is deleted again.
        _torch.replace(owner, name, in_float(getattr(owner, name)), undo)
