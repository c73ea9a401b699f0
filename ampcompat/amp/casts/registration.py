"""Functions that users ask amp to cast: ``register_*_function`` and the decorators.

Users register functions by module and name, or decorate their own. The next ``initialize`` whose casts are on replaces
registered ones in their module; they are put back when casts end, and the registrations stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from ampcompat.amp.casts.contexts import cast_state
from ampcompat.amp.casts.installation import wrap_registered
from ampcompat.amp.casts.rules import Rule, op_rules
from ampcompat.amp.casts.wrappers import wrap

F = TypeVar("F", bound=Callable[..., Any])


def _register(module: object, name: str, rule: Rule) -> None:
    shown = getattr(module, "__name__", type(module).__name__)
    if not isinstance(name, str) or not hasattr(module, name):
        raise ValueError(
            f"No function named {name!r} in module {shown} - it must exist when it is registered - check the spelling,"
            " and pass the function's name as a string."
        )
    target = getattr(module, name)
    if not callable(target):
        raise ValueError(
            f"{name!r} in module {shown} is a {type(target).__name__} - what is registered must be a function or a"
            " class - check the name."
        )
    op_rules.registered[id(module), name] = module, name, rule
    if cast_state.patches is not None:
        wrap_registered()


def register_half_function(module: object, name: str) -> None:
    """Cast the arguments of ``module.name`` to half while casts are on (``apex/amp/amp.py: register_half_function``).

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name. A class found there keeps its identity: a module's ``forward`` is wrapped, an
            ``autograd.Function``'s ``apply``, any other class's ``__call__``.

    Raises:
        ValueError: ``module`` has no such attribute, or it is not a function.
    """
    _register(module, name, Rule.HALF)


def register_bfloat16_function(module: object, name: str) -> None:
    """As :func:`register_half_function`, to bfloat16, at O1 too; as in ROCm's fork of apex.

    Args:
        module: What holds the function.
        name: Its attribute name.
    """
    _register(module, name, Rule.BFLOAT16)


def register_float_function(module: object, name: str) -> None:
    """As :func:`register_half_function`, to float32 (``apex/amp/amp.py: register_float_function``).

    Args:
        module: What holds the function.
        name: Its attribute name.
    """
    _register(module, name, Rule.FLOAT)


def register_promote_function(module: object, name: str) -> None:
    """As :func:`register_half_function`, to the widest dtype (``apex/amp/amp.py: register_promote_function``).

    Args:
        module: What holds the function.
        name: Its attribute name.
    """
    _register(module, name, Rule.PROMOTE)


def _check_decorable(function: object, decorator: str) -> None:
    if not callable(function) and not isinstance(function, classmethod):
        raise TypeError(
            f"{decorator} got an object of type {type(function).__name__} - it decorates a function or a class - pass"
            " the function itself."
        )


def _decorated(function: F, rule: Rule, decorator: str) -> F:
    _check_decorable(function, decorator)
    method, wrapper = wrap(function, rule)
    if not method:
        return cast(F, wrapper)
    setattr(function, method, wrapper)
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
    return _decorated(fn, Rule.HALF, "half_function")


def bfloat16_function(fn: F) -> F:
    """Decorate ``fn`` to get its arguments in bfloat16 while casts are on, at O1 too; as in ROCm's fork of apex.

    Args:
        fn: What :func:`half_function` takes; what that returns is returned.
    """
    return _decorated(fn, Rule.BFLOAT16, "bfloat16_function")


def float_function(fn: F) -> F:
    """Decorate ``fn`` to get its half arguments in float32 while casts are on (``apex/amp/amp.py: float_function``).

    Args:
        fn: What :func:`half_function` takes; what that returns is returned.
    """
    return _decorated(fn, Rule.FLOAT, "float_function")


def promote_function(fn: F) -> F:
    """Decorate ``fn`` to get its arguments in the widest dtype among them (``apex/amp/amp.py: promote_function``).

    Args:
        fn: What :func:`half_function` takes; what that returns is returned.
    """
    return _decorated(fn, Rule.PROMOTE, "promote_function")
