"""Modules: their kinds, their state dicts, and which of them runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ampcompat._torch.patch import replace

#: What runs while a module is called.
_CALL: Any = torch.nn.Module._call_impl.__code__


def register_state_dict_hooks(
    module: Any, after_save: Callable[..., None], before_load: Callable[..., None], after_load: Callable[..., None]
) -> list[RemovableHandle]:
    """Hook saving and loading of ``module``'s own tensors; hooks survive deepcopy and pickle. Returns their handles."""
    return [
        module._register_state_dict_hook(after_save),
        module._register_load_state_dict_pre_hook(before_load, with_module=True),
        module.register_load_state_dict_post_hook(after_load),
    ]


def watch_zero_grad(zeroed: Callable[[torch.nn.Module, bool], None], undo: ExitStack) -> None:
    """Call ``zeroed(module, set_to_none)`` after each ``module.zero_grad()``."""
    original: Callable[..., None] = torch.nn.Module.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        zeroed(self, set_to_none)

    replace(torch.nn.Module, "zero_grad", zero_grad, undo)


def is_graph_module(cls: type) -> bool:
    """Whether ``cls`` is a class of ``torch.fx``: one of a single module, on which its code is set as ``forward``."""
    return issubclass(cls, torch.fx.GraphModule)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module behind ``torch.compile(module)``; ``model`` itself where it is not compiled."""
    if type(model).__name__ != "OptimizedModule":
        return model
    inner: torch.nn.Module = model._modules.get("_orig_mod") or model
    return inner


def running_module(frame: FrameType | None, bottom: FrameType | None) -> torch.nn.Module | None:
    """The innermost module whose call runs, from ``frame`` to below ``bottom``; None outside of any."""
    while frame is not None and frame is not bottom:
        if frame.f_code is _CALL:
            module: torch.nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None
