"""``torch.distributed.checkpoint``: the functions that name the parameters of optimizers."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from ampcompat._torch.patch import replace

#: Called with the model, its optimizers, and the names of parameters by tensor; the context holds while torch saves
#: or loads the optimizers' state.
Around = Callable[[torch.nn.Module, Sequence[Any], MutableMapping[Any, set[str]]], AbstractContextManager[None]]

_HOME = "torch.distributed.checkpoint.state_dict"


def has_distributed_checkpoint() -> bool:
    """Whether a script uses ``torch.distributed.checkpoint``, or may: it has imported it, or runs in a process group.

    Other scripts are spared the import, which takes half a second.
    """
    if not torch.distributed.is_available():
        return False
    return _HOME in sys.modules or torch.distributed.is_initialized()


def patch_distributed_checkpoint(around: Around, undo: ExitStack) -> None:
    """Run ``get_state_dict``, ``set_state_dict`` and their like in ``around``."""
    module = importlib.import_module(_HOME)
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
