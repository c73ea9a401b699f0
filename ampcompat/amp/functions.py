"""Functions whose arguments are cast as their user said, while casts are on.

Users register functions by module and name, or decorate their own. The next ``initialize`` whose casts are on replaces
registered ones in their module; they are put back when casts end, and the registrations stay.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.rules import Rule, make_wrapper

F = TypeVar("F", bound=Callable[..., Any])

_C = types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType


def wrap_function(function: Any, rule: Rule) -> Any:
    """Wrap ``function``, no class; a static or class method stays one.

    For a function of torch's own the user's word beats the list: ``register_float_function(torch, "matmul")``
    multiplies in float32.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(wrap_function(function.__func__, rule))
    module = str(getattr(function, "__module__", None) or "")
    of_torch = module in ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
    if isinstance(function, _C):  # methods of Tensor name a class, functions of torch.* a bound type object
        owners = (getattr(function, "__objclass__", None), type(getattr(function, "__self__", None)))
        modules = (module, *(getattr(owner, "__module__", "") for owner in owners))
        of_torch = any(name.split(".")[0] == "torch" for name in modules)
    return make_wrapper(function, rule, overrule=of_torch)


def _wrap_class(cls: type, rule: Rule) -> tuple[str, Any]:
    """Wrap the method that stands for calling ``cls``, which keeps its identity; return its name and the wrapper."""
    if issubclass(cls, torch.autograd.Function):
        return "apply", staticmethod(make_wrapper(cls.apply, rule))
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    of_torch = cls.__module__.split(".")[0] == "torch"
    return name, make_wrapper(getattr(cls, name), rule, overrule=rule is Rule.FLOAT and of_torch)


def _register(module: object, name: str, rule: Rule) -> None:
    if not isinstance(name, str) or not hasattr(module, name):
        raise ValueError(
            f"No function named {name!r} in module {getattr(module, '__name__', type(module).__name__)} - it must exist"
            " when it is registered - check the spelling, and pass the function's name as a string."
        )
    state.functions[id(module), name] = module, name, rule
    if state.casts.patches is not None:
        activate()


def register_half_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to half while casts are on (``apex/amp/amp.py: register_half_function``).

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name. A class found there keeps its identity: a module's ``forward`` is wrapped, an
            ``autograd.Function``'s ``apply``, any other class's ``__call__``.

    Raises:
        ValueError: ``module`` has no such attribute.
    """
    _register(module, name, Rule.HALF)


def register_float_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to float32 while casts are on.

    As in apex (``apex/amp/amp.py: register_float_function``). Arguments, classes and errors are as with
    :func:`register_half_function`.
    """
    _register(module, name, Rule.FLOAT)


def register_promote_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to the widest dtype among them while casts are on.

    As in apex (``apex/amp/amp.py: register_promote_function``). Arguments, classes and errors are as with
    :func:`register_half_function`.
    """
    _register(module, name, Rule.PROMOTE)


def activate() -> None:
    """Wrap everything registered, once, until ``state.casts.functions`` is closed; the registrations stay."""
    undo = state.casts.functions
    undo.close()
    for module, name, rule in state.functions.values():
        target = getattr(module, name)
        if isinstance(target, type):
            _torch.replace(target, *_wrap_class(target, rule), undo)
            continue
        own = getattr(module, "__dict__", {}).get(name)  # a static method must not turn into a method
        _torch.replace(module, name, wrap_function(own if isinstance(own, staticmethod) else target, rule), undo)


def _decorated(function: Any, rule: Rule) -> Any:
    if not isinstance(function, type):
        return wrap_function(function, rule)
    setattr(function, *_wrap_class(function, rule))
    return function


def half_function(fn: F) -> F:
    """Decorate ``fn`` to get its floating tensor arguments in half while casts are on.

    Works on Python functions, C builtins, ``Function.apply``, methods of every kind and classes, before or after any
    ``initialize`` (``apex/amp/amp.py: half_function``).

    Args:
        fn: The function or class.

    Returns:
        A function in its place, or the class itself.
    """
    return cast(F, _decorated(fn, Rule.HALF))


def float_function(fn: F) -> F:
    """Decorate ``fn`` to get its half arguments in float32 while casts are on (``apex/amp/amp.py: float_function``).

    Args:
        fn: What :func:`half_function` takes; what that returns is returned.
    """
    return cast(F, _decorated(fn, Rule.FLOAT))


def promote_function(fn: F) -> F:
    """Decorate ``fn`` to get its arguments in the widest dtype among them (``apex/amp/amp.py: promote_function``).

    Args:
        fn: What :func:`half_function` takes; what that returns is returned.
    """
    return cast(F, _decorated(fn, Rule.PROMOTE))
