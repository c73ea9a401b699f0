"""Functions that users register by module and name, and the decorators for functions of their own.

Registrations wait for the next ``initialize`` whose casts are on, which wraps the functions where they live, and are
undone with the casts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from ampcompat._state import state
from ampcompat._undo import on_undo
from ampcompat.amp.wrap import FLOAT, HALF, PROMOTE, make_wrapper, wrap_class

F = TypeVar("F", bound=Callable[..., Any])


class Registry:
    """What was registered, and the undo of what is wrapped."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self.undo = ExitStack()
        self.active = False


def registry() -> Registry:
    """The process's registry."""
    room: Registry = state.room("registered functions", Registry)
    return room


def _register(module: Any, name: str, kind: str) -> None:
    if not isinstance(name, str) or not hasattr(module, name):
        shown = getattr(module, "__name__", type(module).__name__)
        raise ValueError(
            f"No function named {name!r} in module {shown} - it must exist when it is registered - check the spelling,"
            " and pass the module object with the function's name as a string."
        )
    room = registry()
    room.waiting[id(module), name] = (module, name, kind)
    if room.active:
        deactivate()
        activate()


def register_half_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its arguments to half while casts are on.

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name; a class found there keeps its identity, its forward is wrapped.

    Raises:
        ValueError: ``module`` has no such attribute.
    """
    _register(module, name, HALF)


def register_float_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its arguments to float32 while casts are on; see :func:`register_half_function`."""
    _register(module, name, FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its arguments to the widest dtype among them while casts are on.

    See :func:`register_half_function`.
    """
    _register(module, name, PROMOTE)


def activate() -> None:
    """Wrap everything registered. Idempotent."""
    room = registry()
    if room.active:
        return
    room.active = True
    on_undo(state.undo, deactivate)
    for module, name, kind in room.waiting.values():
        target = getattr(module, name)
        if isinstance(target, type):
            method, wrapper = wrap_class(target, kind)
            _replace(target, method, wrapper, room.undo)
        else:
            _replace(module, name, make_wrapper(target, kind), room.undo)


def _replace(owner: Any, name: str, wrapper: Any, undo: ExitStack) -> None:
    missing = object()
    own = vars(owner).get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)
    if own is missing:
        on_undo(undo, _delete, owner, name)
    else:
        on_undo(undo, setattr, owner, name, own)
    # A function found on a class through staticmethod must not turn into a method.
    setattr(owner, name, staticmethod(wrapper) if isinstance(own, staticmethod) else wrapper)


def _delete(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def deactivate() -> None:
    """Undo :func:`activate`; the registrations stay for the next time. Idempotent."""
    room = registry()
    room.active = False
    room.undo.close()


def _decorated(function: Any, kind: str) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(make_wrapper(function.__func__, kind))
    if isinstance(function, type):
        name, wrapper = wrap_class(function, kind)
        setattr(function, name, wrapper)
        return function
    return make_wrapper(function, kind)


def half_function(fn: F) -> F:
    """Decorator: while casts are on, ``fn`` gets its floating tensor arguments in half.

    Works on Python functions, C builtins, ``Function.apply``, methods of every kind and classes, at import time and
    before any ``initialize``.
    """
    decorated: F = _decorated(fn, HALF)
    return decorated


def float_function(fn: F) -> F:
    """Decorator: while casts are on, ``fn`` gets its half arguments in float32; see :func:`half_function`."""
    decorated: F = _decorated(fn, FLOAT)
    return decorated


def promote_function(fn: F) -> F:
    """Decorator: while casts are on, ``fn`` gets its arguments in the widest dtype among them.

    See :func:`half_function`.
    """
    decorated: F = _decorated(fn, PROMOTE)
    return decorated
