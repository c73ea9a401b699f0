"""Autocast's state in a thread, and the choke points of autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import torch
from packaging.version import Version
from torch.autograd.function import BackwardCFunction

from ampcompat._torch.patch import Wrap, replace
from ampcompat._torch.version import TORCH

#: Whether a cast made under ``no_grad`` may be handed to code that needs its gradient (torch before 2.7 did).
CACHES_WEIGHTS_ACROSS_GRAD_MODES: Final = Version("2.7") > TORCH


def autocast_nesting() -> int:
    """How many autocast regions (ours included) this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def stash_in_thread(key: str, value: int) -> None:
    """Keep ``value`` in this thread and in the threads of the autograd engine that work for it."""
    torch._C._stash_obj_in_tls(key, value)


def stashed_in_thread(key: str) -> int:
    """What :func:`stash_in_thread` has kept, 0 where nothing.

    In the engine's threads, where backward bodies run for tensors on a device: what held in the thread that started it.
    """
    if not torch._C._is_key_in_tls(key):
        return 0
    value: int = torch._C._get_obj_in_tls(key)
    return value


def accelerator() -> str:
    """The device type of the accelerator that this torch sees, "cpu" without one; does not initialise it."""
    for device_type in ("cuda", "xpu", "mps", "hpu", torch._C._get_privateuse1_backend_name()):
        backend = getattr(torch, device_type, None)
        if backend is not None and callable(getattr(backend, "is_available", None)) and backend.is_available():
            return device_type
    return "cpu"


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass ends; not when it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def patch_engine(wrap: Wrap, undo: ExitStack) -> None:
    """Wrap the one function through which ``backward`` and ``autograd.grad`` enter the engine."""
    name = "_engine_run_backward"
    replace(torch.autograd, name, wrap(vars(torch.autograd)[name]), undo)


def patch_autocast_regions(changed: Callable[[str, int, bool], None], undo: ExitStack) -> None:
    """Call ``changed(device type, 1 or -1, whether its dtype changed)`` after each entry to a region and each exit."""
    owner = torch.amp.autocast_mode.autocast

    def counting(original: Callable[..., object], change: int) -> Callable[..., object]:
        @functools.wraps(original)
        def wrapper(self: torch.amp.autocast_mode.autocast, *exc: object) -> object:
            before = torch.get_autocast_dtype(self.device)
            result = original(self, *exc)
            if not torch._jit_internal.is_scripting():
                changed(self.device, change, torch.get_autocast_dtype(self.device) != before)
            return result

        return wrapper

    replace(owner, "__enter__", counting(owner.__enter__, 1), undo)
    replace(owner, "__exit__", counting(owner.__exit__, -1), undo)


def patch_function_bodies(record: Callable[[BackwardCFunction], None], wrap: Wrap, undo: ExitStack) -> None:
    """Call ``record`` on the context of every ``autograd.Function`` forward and wrap its backward."""

    def __init__(self: BackwardCFunction, *args: object, **kwargs: object) -> None:
        record(self)

    for name in ("apply", "apply_boxed"):
        if name in vars(BackwardCFunction):
            replace(BackwardCFunction, name, wrap(vars(BackwardCFunction)[name]), undo)
    replace(BackwardCFunction, "__init__", __init__, undo)
