"""Kernels on the dispatcher's autocast keys, which apply the rules that native autocast does not follow by itself.

A kernel runs only while autocast is on for its device type, and reads the half dtype from autocast when it is called:
users' own autocast regions, checkpoint recomputation and threads get what they ask for. Like native autocast, kernels
cast float16, bfloat16 and float32 tensors on their own device type and leave float64 and every other argument alone.

They are Python: a call costs the host some 2 microseconds more than native autocast where it casts nothing, 4 with one
cast and 6 with two (``docs/performance.md`` has other machines). A GPU that is behind the host does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts.rules import Rule

#: The dtypes that casts apply to.
CASTABLE: Final = (*HALF_DTYPES, torch.float32)

Kernel = Callable[..., object]
#: Chooses the dtype that arguments are cast to; None leaves them as they are.
Chooser = Callable[[tuple[Any, ...]], torch.dtype | None]


def make_kernel(op: torch._ops.OpOverload, name: str, rule: Rule, device_type: str, key: str) -> Kernel:
    """Make the kernel that applies ``rule`` to ``op`` at the autocast ``key`` of ``device_type``.

    It casts positional arguments only: no listed op takes a tensor as a keyword-only argument.
    """
    if name in _torch.RECURRENT_CELLS and rule is Rule.HALF:
        return _cell_kernel(op, device_type)
    call: Kernel = op
    if _torch.op_name(op) in ("aten::_softmax", "aten::_log_softmax"):
        call = _softmax_of_wide(op)
    below = _torch.keys_excluded(key)
    choose = _dtype_chooser(rule, device_type)

    def kernel(*args: object, **kwargs: object) -> object:
        # One loop and no helper: this is the cost of every listed op.
        dtype: torch.dtype | None
        if choose is not None:
            dtype = choose(args)
        elif kwargs and kwargs.get("dtype") in HALF_DTYPES:
            dtype = None  # the caller wants a half result: as in native autocast
        else:
            dtype = torch.float32
        with below():
            if dtype is None:
                return call(*args, **kwargs)
            cast_args = []
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    arg_dtype = arg.dtype
                    if arg_dtype is not dtype and arg_dtype in CASTABLE and arg.device.type == device_type:
                        arg = _torch.cast_to(arg, dtype)
                elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
                    arg = _cast_list(arg, dtype, device_type)
                cast_args.append(arg)
            return call(*cast_args, **kwargs)

    return kernel


def _softmax_of_wide(op: torch._ops.OpOverload) -> Kernel:
    """Keep ``op`` from widening its result when its input is already float32, which torch refuses."""

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> object:
        return op(x, dim, half_to_float and x.dtype is not torch.float32)

    return softmax


def _cast_list(tensors: Any, dtype: torch.dtype, device_type: str) -> list[Any]:
    """Cast the ``tensors`` (None among them) that are on ``device_type`` and can be cast."""
    cast = []
    for tensor in tensors:
        if tensor is not None and tensor.dtype in CASTABLE and tensor.device.type == device_type:
            tensor = tensor.to(dtype)
        cast.append(tensor)
    return cast


def _cell_kernel(op: torch._ops.OpOverload, device_type: str) -> Kernel:
    """Cast input and states of a recurrent cell; its inner ``linear`` casts the weights, through autocast's cache."""
    inner = _torch.composite(op)

    def kernel(x: torch.Tensor, hidden: Any, *weights: object) -> object:
        dtype = torch.get_autocast_dtype(device_type)
        if isinstance(hidden, (list, tuple)):  # an LSTM cell's
            x, *states = _cast_list((x, *hidden), dtype, device_type)
            return inner(x, states, *weights)
        x, hidden = _cast_list((x, hidden), dtype, device_type)
        return inner(x, hidden, *weights)

    return kernel


def _dtype_chooser(rule: Rule, device_type: str) -> Chooser | None:
    """Make a function from positional arguments to the dtype to cast them to; None where that is always float32."""

    def half(args: tuple[Any, ...]) -> torch.dtype | None:
        return torch.get_autocast_dtype(device_type)

    def widest(args: tuple[Any, ...]) -> torch.dtype | None:
        # A loop of its own, which is faster than ``tensors_in``: a part of the cost of every promoted op.
        dtypes = set()
        pending = list(args)
        for arg in pending:  # the list grows while it is read
            if isinstance(arg, torch.Tensor):
                if arg.dtype in CASTABLE and arg.device.type == device_type:
                    dtypes.add(arg.dtype)
            elif isinstance(arg, (list, tuple)):
                pending.extend(arg)
        return torch.float32 if len(dtypes) > 1 else None  # of float16 and bfloat16, too

    def as_given(args: tuple[Any, ...]) -> torch.dtype | None:
        return None

    def wide_for_bfloat16(args: tuple[Any, ...]) -> torch.dtype | None:
        has_bfloat16 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 for arg in args)
        return torch.float32 if has_bfloat16 else None

    def left(args: tuple[Any, ...]) -> torch.dtype | None:
        dtype: torch.dtype = args[0].dtype
        return dtype if dtype.is_floating_point else None

    choosers: dict[Rule, Chooser] = {
        Rule.HALF: half,
        Rule.PROMOTE: widest,
        Rule.UNCAST: as_given,
        Rule.NO_BFLOAT16: wide_for_bfloat16,
        Rule.LEFT: left,
        Rule.INPLACE_BANNED: left,
    }
    return choosers.get(rule)
