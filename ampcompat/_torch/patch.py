"""Setting an attribute or the body of a function of torch, and setting it back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import TypeAlias

import torch

#: Makes of a function what is called in its place.
Wrap: TypeAlias = Callable[[Callable[..., object]], Callable[..., object]]


def replace(owner: object, name: str, value: object, undo: ExitStack) -> None:
    """Set ``owner.name``; its undo is on ``undo`` first, so that an interrupt between the two leaves nothing behind."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(_delete, owner, name)
    setattr(owner, name, value)


def _delete(owner: object, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def replace_function(owner: object, name: str, value: object, undo: ExitStack) -> None:
    """:func:`replace` a function; where it is one of torch's operators, ``torch.jit.script`` still compiles that."""
    operators: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    operator = operators.get(id(getattr(owner, name)))
    if operator is not None:
        undo.callback(operators.pop, id(value), None)
        operators[id(value)] = operator
    replace(owner, name, value, undo)


def wrap_everywhere(owner: object, function: Callable[..., object], wrap: Wrap, undo: ExitStack) -> None:
    """Have ``wrap(original)`` run wherever ``function`` is called, by code that imported it earlier too.

    A function written in Python keeps its identity: its body is exchanged for one that calls ``wrap(original)``, which
    is a global of its module meanwhile. The new body says that it stands where the old one stood, so that
    ``torch.jit.script`` and tracebacks read torch's own source. Any other callable is replaced in ``owner``.

    Args:
        owner: Module or class that holds ``function`` under its own name.
        function: What to wrap.
        wrap: Gets the original and returns what is called in its place, with the same arguments.
        undo: Takes it back.
    """
    if not isinstance(function, FunctionType) or function.__closure__ or isinstance(owner, type):
        replace_function(owner, getattr(function, "__name__", ""), wrap(function), undo)
        return
    code, hook = function.__code__, f"_ampcompat_{function.__name__}"
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    takes = inspect.getfullargspec(function)
    rest, options = [f"*{takes.varargs}"] if takes.varargs else [], [f"**{takes.varkw}"] if takes.varkw else []
    star = ["*"] if takes.kwonlyargs and not rest else []
    given = takes.args if rest else [f"{name}={name}" for name in takes.args]  # by name, where it can be
    named = [f"{name}={name}" for name in takes.kwonlyargs]
    made: dict[str, FunctionType] = {}
    # exec, since nothing else makes a body with given parameters. Their defaults belong to the function.
    exec(
        f"def body({', '.join([*takes.args, *rest, *star, *takes.kwonlyargs, *options])}):"
        f" return {hook}({', '.join([*given, *rest, *named, *options])})",
        made,
    )
    body = made["body"].__code__.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
    )
    undo.callback(function.__globals__.pop, hook, None)
    function.__globals__[hook] = wrap(original)
    undo.callback(setattr, function, "__code__", code)
    function.__code__ = body
