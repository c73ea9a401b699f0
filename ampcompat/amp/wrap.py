"""Home of names that scripts import from ``apex.amp.wrap``."""

import functools
from collections.abc import Callable
from typing import Any

from ampcompat.amp.casts import disable_casts
from ampcompat.amp.casts.rules import Rule
from ampcompat.amp.casts.wrappers import wrap
from ampcompat.amp.utils import casted_args

__all__ = ["disable_casts", "make_cast_wrapper", "make_promote_wrapper"]

Function = Callable[..., Any]


def make_cast_wrapper(orig_fn: Function, cast_fn: Function, handle: Any, try_caching: bool = False) -> Function:
    """Wrap ``orig_fn`` so that ``cast_fn`` is applied to its floating arguments while ``handle`` is active."""

    @functools.wraps(orig_fn)
    def wrapper(*args: object, **kwargs: Any) -> object:
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        cast_args = casted_args(cast_fn, args, kwargs)  # and those in ``kwargs``, in place
        return orig_fn(*cast_args, **kwargs)

    return wrapper


def make_promote_wrapper(orig_fn: Function, cast_fn: object = None, handle: object = None) -> Any:
    """Wrap ``orig_fn`` so that it gets its floating arguments in the widest dtype among them while casts are on."""
    _, wrapper = wrap(orig_fn, Rule.PROMOTE)
    return wrapper
