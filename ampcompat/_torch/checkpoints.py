"""``torch.distributed.checkpoint``: the functions that name the parameters of optimizers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from ampcompat._torch.patch import replace

#: Called with the model, its optimizers, and the names of parameters by tensor; the context holds while torch saves
#: or loads the optimizers' state.
Around = Callable[[torch.nn.Module, Sequence[Any], MutableMapping[Any, set[str]]], AbstractContextManager[None]]

_HOME = "torch.distributed.checkpoint.state_dict"


def patch_distributed_checkpoint(around: Around, undo: ExitStack) -> None:
    """Have ``get_state_dict``, ``set_state_dict`` and their like run in ``around``; imported later, if not yet."""
    module = sys.modules.get(_HOME)
    if module is not None:
        _patch(module, around, undo)
        return
    finder = _PatchingFinder(lambda imported: _patch(imported, around, undo))
    sys.meta_path.insert(0, finder)
    undo.callback(finder.withdraw)


def _patch(module: ModuleType, around: Around, undo: ExitStack) -> None:
    # The public functions call these two, whatever a script imports by name.
    for name in ("_get_optim_state_dict", "_load_optim_state_dict"):
        replace(module, name, _wrapped(getattr(module, name), around), undo)


def _wrapped(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(model: torch.nn.Module, optimizers: Sequence[Any], *rest: Any, **named: Any) -> Any:
        info = named["info"] if "info" in named else rest[-1]
        with around(model, optimizers, info.fqn_param_mapping):
            return original(model, optimizers, *rest, **named)

    return wrapper


class _PatchingFinder(MetaPathFinder):
    """Finds the module as Python does, and patches it when it has run; an import here would take seconds."""

    def __init__(self, after: Callable[[ModuleType], None]) -> None:
        self.after = after
        self.is_wanted = True

    def withdraw(self) -> None:
        """Leave imports alone from now on."""
        self.is_wanted = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The spec of the module, with a loader that patches it; None for any other."""
        if fullname != _HOME:
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.is_wanted:
                self.withdraw()
                self.after(module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - types do not allow to assign a method
        return spec
