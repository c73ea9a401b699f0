"""The kernels behind the rules: cast the arguments, then dispatch again below autocast.

A kernel runs only while autocast is on for its device type, because its dispatch key is excluded otherwise; it reads
the half dtype from autocast when it is called. So users' own autocast regions, checkpoint recomputation and threads get
what they ask for, and nothing is paid while casts are off. Like native autocast, kernels cast float16, bfloat16 and
float32 tensors on their own device type and leave every other argument alone, float64 included. No listed op takes a
tensor as a keyword-only argument, so keywords (``dtype``, ``alpha``...) pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.overloads import Rule

Kernel: TypeAlias = Callable[..., Any]

HALVES: Final = (torch.float16, torch.bfloat16)
CASTABLE: Final = (torch.float16, torch.bfloat16, torch.float32)


def cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """``value`` with its castable tensors on ``device_type`` in ``dtype``; lists and tuples of tensors included."""
    if isinstance(value, torch.Tensor):
        now = value.dtype
        return value if now is dtype or now not in CASTABLE or value.device.type != device_type else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return [cast(item, dtype, device_type) for item in value]
    return value


def dtypes_in(values: Any, device_type: str) -> set[torch.dtype]:
    """The dtypes of the castable tensors among ``values``."""
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in CASTABLE and value.device.type == device_type:
                found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found |= dtypes_in(value, device_type)
    return found


def half_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """All arguments in the half dtype in force."""
    below = _torch.keys_excluded(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with below():
            return op(*[cast(a, dtype, device_type) for a in args], **kwargs)

    return kernel


def states_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """A recurrent cell: input and states in half here, weights by the ``linear`` inside, which keeps its casts.

    An unrolled cell casts the same weights at every step, and only native kernels reach autocast's weight cache.
    """
    inner = _torch.composite(op)

    def kernel(inputs: torch.Tensor, hidden: Any, *weights: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        return inner(cast(inputs, dtype, device_type), cast(hidden, dtype, device_type), *weights)

    return kernel


def float_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """All arguments in float32; as they are where the caller asks for a half result, as in native autocast."""
    below = _torch.keys_excluded(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below():
            if kwargs and kwargs.get("dtype") in HALVES:
                return op(*args, **kwargs)
            return op(*[cast(a, torch.float32, device_type) for a in args], **kwargs)

    return kernel


def softmax_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """``_softmax(input, dim, half_to_float)``: a half input with ``half_to_float`` already gives float32."""
    below = _torch.keys_excluded(key)

    def kernel(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        with below():
            return op(x if half_to_float else cast(x, torch.float32, device_type), dim, half_to_float)

    return kernel


def promote_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """All arguments in the widest dtype among them; two different half dtypes meet in float32."""
    below = _torch.keys_excluded(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if len(dtypes_in(args, device_type)) > 1:
            args = tuple(cast(a, torch.float32, device_type) for a in args)
        with below():
            return op(*args, **kwargs)

    return kernel


def uncast_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """All arguments as they are, where native autocast would cast them."""
    below = _torch.keys_excluded(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with below():
            return op(*args, **kwargs)

    return kernel


def left_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """An in-place op that demands one dtype: the others take that of the left side."""
    below = _torch.keys_excluded(key)

    def kernel(left: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with below():
            return op(left, *[cast(a, left.dtype, device_type) for a in args], **kwargs)

    return kernel


def inplace_banned_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """An in-place op of the float list: a half left side is refused."""
    below = _torch.keys_excluded(key)
    name = _torch.op_name(op).removeprefix("aten::").partition(".")[0]

    def kernel(left: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if left.dtype in HALVES and left.device.type == device_type:
            raise NotImplementedError(
                f"In-place {name} on a {left.dtype} tensor: amp runs {name[:-1]} in float32, and a half tensor cannot "
                f"hold the result in place. Use the out-of-place form, x = x.{name[:-1]}(...), or x.float() before it."
            )
        with below():
            return op(left, *[cast(a, left.dtype, device_type) for a in args], **kwargs)

    return kernel


def banned_kernel(op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """``binary_cross_entropy``: half arguments are refused, or cast to float32 where the user allowed the op."""
    below = _torch.keys_excluded(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not dtypes_in(args, device_type).isdisjoint(HALVES) and not banned_are_allowed():
            raise NotImplementedError(
                "binary_cross_entropy got a half argument: amp refuses it, since the loss of a half probability near 0 "
                "or 1 overflows. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) without the sigmoid; or, if "
                "the sigmoid must stay, call amp.register_float_function(torch, 'sigmoid') before amp.initialize."
            )
        with below():
            return op(*[cast(a, torch.float32, device_type) for a in args], **kwargs)

    return kernel


def allow_banned(allowed: bool) -> None:
    """Let banned ops run in float32 (True), as ``amp.init(allow_banned=True)`` asks, or refuse half again (False)."""
    state.room("amp.kernels", dict)["allow_banned"] = allowed


def banned_are_allowed() -> bool:
    """Whether banned ops run in float32."""
    return bool(state.room("amp.kernels", dict).get("allow_banned", False))


_MAKERS: Final[dict[Rule, Callable[[torch._ops.OpOverload, str, str], Kernel]]] = {
    Rule.HALF: half_kernel,
    Rule.FLOAT: float_kernel,
    Rule.PROMOTE: promote_kernel,
    Rule.LEFT: left_kernel,
    Rule.UNCAST: uncast_kernel,
    Rule.BANNED: banned_kernel,
    Rule.INPLACE_BANNED: inplace_banned_kernel,
    Rule.STATES: states_kernel,
}


def make_kernel(rule: Rule, op: torch._ops.OpOverload, device_type: str, key: str) -> Kernel:
    """The kernel that applies ``rule`` to ``op`` at the autocast ``key`` of ``device_type``."""
    if _torch.op_name(op) in ("aten::_softmax", "aten::_log_softmax"):
        return softmax_kernel(op, device_type, key)
    return _MAKERS[rule](op, device_type, key)
