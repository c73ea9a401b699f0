"""Wrappers that cast arguments: of functions that torch wrote in Python, and of functions that users register."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.casts.contexts import casts_off
from ampcompat.amp.casts.kernels import CASTABLE
from ampcompat.amp.casts.rules import Rule, op_rules
from ampcompat.amp.casts.trees import map_tree, tensors_in


def make_wrapper(function: Any, rule: Rule, overrule: bool = False) -> Any:
    """Wrap ``function`` so that its floating tensors, nested ones too but not ``out``, are cast where casts are on.

    Takes any callable, and returns a plain function, so that it binds as a method.

    Args:
        function: What is wrapped.
        rule: HALF, BFLOAT16, FLOAT or PROMOTE.
        overrule: Whether ops inside are not cast. Otherwise they still follow the lists.
    """
    fixed_dtype = {Rule.FLOAT: torch.float32, Rule.BFLOAT16: torch.bfloat16}.get(rule)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> object:
        device_types = op_rules.plans
        if not device_types:  # amp casts nothing in this process now
            return function(*args, **kwargs)
        widest = _widest_dtype(args, kwargs) if rule is Rule.PROMOTE else None
        out = kwargs.get("out")
        casting: list[str] = []  # the device types of tensors that casts apply to

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            own_dtype = tensor.dtype
            device_type = tensor.device.type
            if not own_dtype.is_floating_point or device_type not in device_types:
                return tensor
            if not torch.is_autocast_enabled(device_type):
                return tensor
            casting.append(device_type)
            is_left_alone = own_dtype not in CASTABLE and widest is None  # float64, unless arguments are promoted
            if tensor is out or is_left_alone:
                return tensor
            dtype = widest or fixed_dtype or torch.get_autocast_dtype(device_type)
            return tensor if own_dtype == dtype else _torch.cast_to(tensor, dtype)

        args = map_tree(args, cast, objects=False)
        if kwargs:
            kwargs = map_tree(kwargs, cast, objects=False)
        if casting and overrule:
            with casts_off(casting[0]):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def _widest_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype that holds all floating tensors among the arguments; None where there is none."""
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs), objects=False) if tensor.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def wrap(target: Any, rule: Rule) -> tuple[str, Any]:
    """Wrap a function; of a class, which keeps its identity, wrap the method that runs when it is called.

    For a function of torch's own the registration overrules the list: ``register_float_function(torch, "matmul")``
    multiplies in float32. A static or class method stays one.

    Returns:
        The name of the method that is wrapped ("" for a function), and the wrapper.
    """
    if isinstance(target, (staticmethod, classmethod)):
        _, wrapper = wrap(target.__func__, rule)
        return "", type(target)(wrapper)
    if isinstance(target, type):
        return _wrap_class(target, rule)
    return "", make_wrapper(target, rule, overrule=_is_function_of_torch(target))


def _wrap_class(cls: Any, rule: Rule) -> tuple[str, Any]:
    """Wrap the method that runs when ``cls`` is called; return its name, too."""
    if issubclass(cls, torch.autograd.Function):
        return "apply", staticmethod(make_wrapper(cls.apply, rule))
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    overrule = rule is Rule.FLOAT and _is_in_torch(cls.__module__)
    return name, make_wrapper(getattr(cls, name), rule, overrule)


def _is_function_of_torch(function: Any) -> bool:
    """Whether ``function`` is one of the public ops of torch."""
    module = getattr(function, "__module__", None)
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):
        # Methods of Tensor name a class, functions of torch.* a bound type object.
        class_of_method = getattr(function, "__objclass__", None)
        class_of_self = type(getattr(function, "__self__", None))
        modules = [module, *(getattr(owner, "__module__", None) for owner in (class_of_method, class_of_self))]
        return any(_is_in_torch(name) for name in modules)
    return module in ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")


def _is_in_torch(module: object) -> bool:
    """Whether the module of this name is torch, or inside it."""
    return isinstance(module, str) and module.partition(".")[0] == "torch"
