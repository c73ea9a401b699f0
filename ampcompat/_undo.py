"""What Ctrl-C must not cut short: the ways back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def on_undo(undo: ExitStack, function: Callable[..., object], *args: Any) -> None:
    """Have ``undo`` call ``function(*args)``, which must be idempotent.

    It is called twice: an ``ExitStack`` that closes forgets a callback that raises, but goes on with those below.
    """
    undo.callback(function, *args)
    undo.callback(function, *args)


def finish(function: Callable[..., object], *args: Any) -> None:
    """``function(*args)``, which must be idempotent; once more where an exception ended it, before that goes on."""
    try:
        function(*args)
    except BaseException:
        function(*args)
        raise
