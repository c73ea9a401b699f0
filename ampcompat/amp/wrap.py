"""Functions whose arguments are cast as their author or user said, while casts are on."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampcompat._state import state

HALF, FLOAT, PROMOTE = "half", "float", "promote"
_HALVES = (torch.float16, torch.bfloat16)
#: Functions that torch itself makes; written in Python, they are recognised by their module.
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)


def make_wrapper(function: Any, kind: str) -> Any:
    """``function`` with its floating tensor arguments cast, while casts are on for their device.

    Tensors are looked for in arguments and keywords, and in lists, tuples and dicts in these; everything else (self,
    ctx, other objects) passes. Inner ops of a Python function still follow the lists; for a function of torch's own the
    user's word beats the list, so that ``register_float_function(torch, "matmul")`` multiplies in float32.

    Args:
        function: Anything callable: a Python function, a C builtin, ``Function.apply``, a static or abstract method.
        kind: ``"half"``, ``"float"`` or ``"promote"`` (the widest dtype among the arguments).

    Returns:
        A plain function, so that it binds as a method.
    """
    overrules = is_torch_op(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device_type = casting_device((args, kwargs))
        if device_type is None:
            return function(*args, **kwargs)
        dtype = _target(kind, device_type, (args, kwargs))
        args, kwargs = _cast(args, kind, dtype), _cast(kwargs, kind, dtype)
        if not overrules:
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return wrapper


def is_torch_op(function: Any) -> bool:
    """Whether ``function`` is an op of torch, on which the lists have a word."""
    module = str(getattr(function, "__module__", None) or "")
    if isinstance(function, _BUILTIN):  # methods of Tensor name a class, functions of torch.* a bound type object
        owners = (getattr(function, "__objclass__", None), type(getattr(function, "__self__", None)))
        return "torch" in (module.split(".")[0], *(getattr(owner, "__module__", "").split(".")[0] for owner in owners))
    return module in ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")


def casting_device(value: Any) -> str | None:
    """The device type of the first floating tensor in ``value`` for which casts are on; None if there is none."""
    if state.casts.patches is None:
        return None
    for tensor in _tensors(value):
        if torch.is_autocast_enabled(tensor.device.type):
            return str(tensor.device.type)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _target(kind: str, device_type: str, value: Any) -> torch.dtype:
    if kind == HALF:
        return torch.get_autocast_dtype(device_type)
    if kind == FLOAT:
        return torch.float32
    return functools.reduce(torch.promote_types, (t.dtype for t in _tensors(value)))


def _cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        wanted = {HALF: (torch.float32, *_HALVES), FLOAT: _HALVES}.get(kind)  # float64 is left alone, as under apex
        if value.is_floating_point() and value.dtype != dtype and (wanted is None or value.dtype in wanted):
            return value.to(dtype)
        return value
    if isinstance(value, (list, tuple)):
        items = [_cast(item, kind, dtype) for item in value]
        make: Callable[[Any], Any] = getattr(type(value), "_make", type(value))
        return make(items)
    if type(value) is dict:
        return {key: _cast(item, kind, dtype) for key, item in value.items()}
    return value


def wrap_class(cls: type, kind: str) -> tuple[str, Any]:
    """The method that stands for calling ``cls``, wrapped: its name and the wrapper.

    The class keeps its identity (``isinstance`` goes on working): a module's ``forward`` is wrapped, an
    ``autograd.Function``'s ``apply``, any other class's ``__call__``.
    """
    name = next((n for n in ("forward", "apply") if _is_callable_by(cls, n)), "__call__")
    if name == "apply":
        return name, staticmethod(make_wrapper(cls.apply, kind))  # type: ignore[attr-defined]
    method = make_wrapper(getattr(cls, name), kind)
    if kind != FLOAT or cls.__module__.split(".")[0] != "torch":
        return name, method

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        device_type = casting_device((args, kwargs))
        if device_type is None:
            return method(self, *args, **kwargs)
        args, kwargs = _cast(args, kind, torch.float32), _cast(kwargs, kind, torch.float32)
        with torch.autocast(device_type, enabled=False):
            return method(self, *args, **kwargs)

    return name, forward


def _is_callable_by(cls: type, name: str) -> bool:
    owner: type = torch.nn.Module if name == "forward" else torch.autograd.Function
    return issubclass(cls, owner)
