"""Modes that stay for longer than a ``with`` statement of the script."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def enter_outermost(mode: Any) -> None:
    """Enter ``mode``, a function mode or a dispatch mode, below the modes that are in force.

    A ``with`` statement of the script's that ends takes the innermost mode off, which must not be this one.
    """
    others = [_pop(mode) for _ in range(_depth(mode))]
    try:
        mode.__enter__()
    finally:
        for other in reversed(others):
            _push(other)


def leave_outermost(mode: Any) -> None:
    """Leave ``mode``, which :func:`enter_outermost` has entered, whatever was entered since."""
    others = []
    while _depth(mode):
        other = _pop(mode)
        if other is mode:
            _push(mode)
            mode.__exit__(None, None, None)
            break
        others.append(other)
    for other in reversed(others):
        _push(other)


def _depth(like: Any) -> int:
    if isinstance(like, TorchFunctionMode):
        return torch._C._len_torch_function_stack()
    return torch._C._len_torch_dispatch_stack()


def _pop(like: Any) -> Any:
    if isinstance(like, TorchFunctionMode):
        return torch._C._pop_torch_function_stack()
    return torch._C._pop_torch_dispatch_stack(None)


def _push(mode: Any) -> None:
    if isinstance(mode, TorchFunctionMode):
        torch._C._push_on_torch_function_stack(mode)
    else:
        torch._C._push_on_torch_dispatch_stack(mode)
