"""Refuse half where a script calls a banned function, or changes a half tensor in place by an op of the float list.

A call of the script is refused, by the name that it uses: ``x.exp_()``, ``torch.exp_(x)``, ``x **= 2``,
``F.binary_cross_entropy(half, y)``. torch calls the same ops for itself: ``square_`` is made of ``pow_``, and
``nn.init.trunc_normal_`` calls ``Tensor.log_``. These calls run in the dtype that they are given. apex patched names
too, and so did not see the calls that torch makes in C++ (``apex/amp/amp.py: init``).

The compiler, while it traces, calls the same names on tensors without values, so that compiled code is refused too.
There nothing tells the calls of the script from the calls of torch's own Python code, and both are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts.rules import OWNERS, op_rules, public_name
from ampcompat.amp.casts.trees import tensors_in


def refuse_in_place(names: Iterable[str], undo: ExitStack) -> None:
    """Refuse a half left side wherever scripts call the in-place forms ``names`` (``exp_``), until ``undo`` runs."""
    operators = {f"{public_name(name)}_": name for name in dir(torch.Tensor) if name.startswith("__i")}
    for name in names:
        bindings = [(owner, name) for owner in OWNERS if callable(getattr(owner, name, None))]
        if name in operators:
            bindings.append((torch.Tensor, operators[name]))
        for owner, attribute in bindings:
            refusing = _refusing_left_side(getattr(owner, attribute), name)
            _torch.replace_function(owner, attribute, refusing, undo)


def ban(name: str, message: str, in_float32: _torch.Wrap, undo: ExitStack) -> None:
    """Refuse half arguments wherever scripts call ``name``, until ``undo`` runs.

    Args:
        name: A public name; every owner that has it is patched.
        message: What the error says.
        in_float32: Makes of the function one that casts, for ``amp.init(allow_banned=True)``.
        undo: Takes it back.
    """
    refusing = functools.partial(_refusing_half, message=message, in_float32=in_float32)
    for owner in OWNERS:
        function = getattr(owner, name, None)
        if isinstance(function, FunctionType) and owner is not torch.Tensor:
            _torch.wrap_everywhere(owner, function, refusing, undo)
        elif callable(function):
            _torch.replace_function(owner, name, refusing(function), undo)


def _refusing_left_side(function: Callable[..., object], name: str) -> Callable[..., object]:
    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> object:
        left: Any = args[0] if args else kwargs.get("input")
        if _is_half_under_casts(left) and not _called_by_torch():
            raise _refusal(left, name)
        return function(*args, **kwargs)

    return refusing


def _refusing_half(function: Callable[..., object], message: str, in_float32: _torch.Wrap) -> Callable[..., object]:
    casting = in_float32(function)

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> object:
        if op_rules.allow_banned:
            return casting(*args, **kwargs)
        for tensor in tensors_in((args, kwargs), objects=False):
            if _is_half_under_casts(tensor):
                raise NotImplementedError(message)
        return function(*args, **kwargs)

    return refusing


def _is_half_under_casts(value: object) -> bool:
    """Whether ``value`` is a half tensor on a device type whose functions amp casts here."""
    if not isinstance(value, torch.Tensor) or value.dtype not in HALF_DTYPES:
        return False
    device_type = value.device.type
    return device_type in op_rules.plans and torch.is_autocast_enabled(device_type)


def _called_by_torch() -> bool:
    """Whether torch's own Python code, and no script, has called the caller of this function."""
    if torch.compiler.is_compiling() or _torch.in_fake_mode():  # the frames are the compiler's
        return False
    caller = sys._getframe(2)  # 0 is this function, and 1 the wrapper of the op
    module = str(caller.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "torch"


def _refusal(left: torch.Tensor, name: str) -> NotImplementedError:
    op = name[:-1]
    return NotImplementedError(
        f"In-place {name} on a {left.dtype} tensor: amp runs {op} in float32, and a half tensor cannot hold the result."
        f" Use the out-of-place form, x = x.{op}(...), or x.float() before it."
    )
