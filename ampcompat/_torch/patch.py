"""Setting an attribute or the body of a function of torch, and setting it back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import Any, TypeAlias

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
    """Replace ``function`` by ``wrap(original)`` wherever it is called, also by code that imported it earlier.

    A function written in Python keeps its identity: its code is replaced by code that calls ``wrap(original)``, which
    is a global of its module until ``undo`` runs. The new code has the file and line of the old one, so that
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
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    wrapper_name = f"_ampcompat_{function.__name__}"
    undo.callback(function.__globals__.pop, wrapper_name, None)
    function.__globals__[wrapper_name] = wrap(original)
    body = _body_that_calls(wrapper_name, function)
    undo.callback(setattr, function, "__code__", code)
    function.__code__ = body.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
    )


def with_parameters_of(function: Callable[..., object], called: Callable[..., object]) -> Callable[..., object]:
    """Make a function that calls ``called`` and shows the parameters of ``function``, in its code too.

    Helpers of export and of data pipelines read ``model.forward.__code__.co_varnames``. A callable that is not written
    in Python has no code to show: ``called`` is returned for it.
    """
    if not isinstance(function, FunctionType):
        return functools.update_wrapper(called, function)
    parameters, arguments = _parameters_and_arguments(function, by_name=False)
    source = f"def make(_called):\n    return lambda {parameters}: _called({arguments})"
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    shown: FunctionType = namespace["make"](called)
    functools.update_wrapper(shown, function)
    shown.__code__ = shown.__code__.replace(co_name=function.__name__)
    shown.__defaults__ = function.__defaults__
    shown.__kwdefaults__ = function.__kwdefaults__
    vars(shown)["__signature__"] = inspect.signature(function)
    return shown


def set_class(instance: object, cls: type) -> None:
    """Set the class of ``instance``, past a property of its class that answers for ``__class__``."""
    object.__dict__["__class__"].__set__(instance, cls)


def _body_that_calls(name: str, function: FunctionType) -> CodeType:
    """Compile a body with the parameters of ``function`` that hands all of them on to the global ``name``."""
    parameters, arguments = _parameters_and_arguments(function, by_name=True)
    namespace: dict[str, FunctionType] = {}
    # exec, since nothing else makes a body with given parameters. Their defaults belong to the function.
    exec(f"def body({parameters}): return {name}({arguments})", namespace)
    return namespace["body"].__code__


def _parameters_and_arguments(function: FunctionType, by_name: bool) -> tuple[str, str]:
    """The parameters of ``function`` as source, without defaults, and arguments that hand all of them on.

    ``by_name``: parameters that may stand by position or by name are handed on by name, where no ``*args`` follow.
    """
    spec = inspect.getfullargspec(function)
    parameters = list(spec.args)
    arguments = list(spec.args)
    if by_name and not spec.varargs:
        arguments = [f"{name}={name}" for name in spec.args]
    if spec.varargs:
        parameters.append(f"*{spec.varargs}")
        arguments.append(f"*{spec.varargs}")
    elif spec.kwonlyargs:
        parameters.append("*")
    parameters += spec.kwonlyargs
    arguments += [f"{name}={name}" for name in spec.kwonlyargs]
    if spec.varkw:
        parameters.append(f"**{spec.varkw}")
        arguments.append(f"**{spec.varkw}")
    return ", ".join(parameters), ", ".join(arguments)
