"""Functions that users have cast: ``register_*_function``, the decorators, and ``amp.init``, the API of before 2019.

Users register functions by module and name, or decorate their own. The next ``initialize`` whose casts are on replaces
registered ones in their module; they are put back when casts end, and the registrations stay. ``init`` casts without a
model, and returns a handle to scale losses with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp._amp_state import _amp_state
from ampcompat.amp.amp_model import device_types_of
from ampcompat.amp.autocast import cover, set_ambient
from ampcompat.amp.handle import AmpHandle, NoOpHandle
from ampcompat.amp.properties import HALF_DTYPES, read_properties
from ampcompat.amp.rules import Rule, wrap, wrap_registered
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.session import Session

__all__ = ["bfloat16_function", "float_function", "half_function", "init", "promote_function"]
__all__ += ["register_bfloat16_function", "register_float_function", "register_half_function"]
__all__ += ["register_promote_function"]

F = TypeVar("F", bound=Callable[..., Any])


def _register(module: object, name: str, rule: Rule) -> None:
    if not isinstance(name, str) or not hasattr(module, name):
        raise ValueError(
            f"No function named {name!r} in module {getattr(module, '__name__', type(module).__name__)} - it must exist"
            " when it is registered - check the spelling, and pass the function's name as a string."
        )
    target = getattr(module, name)
    if not callable(target):
        shown = getattr(module, "__name__", type(module).__name__)
        raise ValueError(
            f"{name!r} in module {shown} is a {type(target).__name__} - what is registered must be a function or a"
            " class - check the name."
        )
    state.functions[id(module), name] = module, name, rule
    if state.casts.patches is not None:
        wrap_registered()


def register_half_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to half while casts are on (``apex/amp/amp.py: register_half_function``).

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name. A class found there keeps its identity: a module's ``forward`` is wrapped, an
            ``autograd.Function``'s ``apply``, any other class's ``__call__``.

    Raises:
        ValueError: ``module`` has no such attribute, or it is no function.
    """
    _register(module, name, Rule.HALF)


def register_bfloat16_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to bfloat16 while casts are on, at O1 too; as in ROCm's fork of apex.

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name; see :func:`register_half_function` for classes.

    Raises:
        ValueError: ``module`` has no such attribute, or it is no function.
    """
    _register(module, name, Rule.BFLOAT16)


def register_float_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to float32 while casts are on.

    As in apex (``apex/amp/amp.py: register_float_function``).

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name; see :func:`register_half_function` for classes.

    Raises:
        ValueError: ``module`` has no such attribute, or it is no function.
    """
    _register(module, name, Rule.FLOAT)


def register_promote_function(module: object, name: str) -> None:
    """Have ``module.name`` cast its arguments to the widest dtype among them while casts are on.

    As in apex (``apex/amp/amp.py: register_promote_function``).

    Args:
        module: Module, class or namespace object that holds the function.
        name: Its attribute name; see :func:`register_half_function` for classes.

    Raises:
        ValueError: ``module`` has no such attribute, or it is no function.
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


def _rocm_order(init: Callable[..., AmpHandle]) -> Callable[..., AmpHandle]:
    """Have ``init`` take ``patch_type`` as third argument, where ROCm's fork has it, if that is a dtype."""

    @functools.wraps(init)
    def either_order(*args: Any, **kwargs: Any) -> AmpHandle:
        if len(args) > 2 and isinstance(args[2], torch.dtype):
            enabled, loss_scale, patch_type, *rest = args
            return init(enabled, loss_scale, *rest, patch_type=patch_type, **kwargs)
        return init(*args, **kwargs)

    return either_order


@overload
def init(
    enabled: bool = ...,
    loss_scale: float | str = ...,
    enable_caching: bool = ...,
    verbose: bool = ...,
    allow_banned: bool = ...,
    *,
    patch_type: torch.dtype | None = ...,
) -> AmpHandle: ...
@overload
def init(
    enabled: bool,
    loss_scale: float | str,
    patch_type: torch.dtype,
    enable_caching: bool = ...,
    verbose: bool = ...,
    allow_banned: bool = ...,
) -> AmpHandle: ...
@_rocm_order
def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype | None = None,
) -> AmpHandle:
    """Cast functions as at O1, without a model, on the accelerator or else the CPU (``apex/amp/amp.py: init``).

    After ``initialize`` the forwards of its models cast functions too, whatever their level (espnet wants that at O2);
    its scalers and ``_amp_state`` stay what they are.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: Scale of ``handle.scale_loss``.
        enable_caching: Accepted; casts outside a model's forward are not cached.
        verbose: Accepted.
        allow_banned: Let ``binary_cross_entropy`` take half arguments, in float32, instead of refusing.
        patch_type: ``torch.float16`` or ``torch.bfloat16``, the dtype of code outside of initialized models; None is
            that of the latest ``initialize``, else float16. ROCm's fork has it third, before ``enable_caching``: a
            dtype in that place is taken for it.

    Returns:
        The handle: ``scale_loss``, ``wrap_optimizer``, ``is_active``, ``_deactivate``, ...

    Raises:
        ValueError: ``loss_scale`` cannot be read.
        RuntimeError: ``patch_type`` is neither of the two.
    """
    if patch_type not in (None, *HALF_DTYPES):
        raise RuntimeError(
            f"amp.init got patch_type={patch_type!r} - functions are cast to torch.float16 or torch.bfloat16 - pass one"
            " of these."
        )
    if not enabled:
        no_op = NoOpHandle()
        _amp_state.handle = no_op
        return no_op
    level = "O4" if patch_type is torch.bfloat16 else "O1"
    properties, half_dtype = read_properties(level, {"loss_scale": loss_scale})
    latest = state.session
    follows_initialize = latest is not None and not latest.by_init
    if latest is not None and follows_initialize and patch_type is None:
        half_dtype = latest.half_dtype
    session = Session(properties, half_dtype, scalers=[LossScaler(properties.loss_scale)], by_init=True)
    state.rules.allow_banned = allow_banned
    _begin_casts(session)
    handle = AmpHandle(session)
    if not follows_initialize:
        state.session = session
        state.view.update(opt_properties=properties, loss_scalers=session.scalers, handle=handle)
    return handle


def _begin_casts(session: Session) -> None:
    """Make the casts of ``session`` ambient, and cast functions in the forwards of all models."""
    of_models = device_types_of(state.models.live) & set(_torch.autocast_device_types())
    session.device_types = of_models | {_torch.accelerator()}
    cover(session.device_types)
    for model in state.models.live:
        policy = model.__dict__["_amp_policy"]
        if not policy.casts.enabled:  # forwards at other levels cast functions too, into their own half dtype
            session.casting.append(policy)
            policy.casts = policy.casts._replace(enabled=True)
    set_ambient(session.policy.casts, session.device_types)
