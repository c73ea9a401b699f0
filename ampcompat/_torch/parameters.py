"""Writes that move no version: through ``param.data``, and of our own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat._torch.dispatcher import keys_excluded
from ampcompat._torch.patch import replace

_DATA: Any = vars(torch._C.TensorBase)["data"]

#: ``with versions_kept():`` writes in place move the version of no tensor, as writes through ``data`` move none. It is
#: one guard for a list; an alias for each tensor would cost as much as the write. For code under ``no_grad``.
versions_kept = keys_excluded("ADInplaceOrView")


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.data``, which is not noted."""
    data: torch.Tensor = _DATA.__get__(tensor) if type(tensor) is torch.nn.Parameter else tensor.data
    return data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, which is not noted."""
    if type(tensor) is torch.nn.Parameter:
        _DATA.__set__(tensor, data)
    else:  # a class of another's may have a property of its own
        tensor.data = data


def watch_parameter_data(taken: Callable[[torch.Tensor], None], undo: ExitStack) -> None:
    """Call ``taken(param)`` when ``param.data`` of any ``Parameter`` is read or assigned, before that is done.

    Code that holds ``param.data`` can write to ``param`` without moving its version. Collectives
    (``dist.broadcast(param, 0)``) write that way too, so they call ``taken`` as well.

    A property of ``torch.nn.Parameter``, and no subclass: torch compares ``type(p)`` with ``Parameter`` where it takes
    its fast paths, and ``Parameter(p)`` refuses a ``p`` of another class.
    """

    def get(param: torch.Tensor) -> torch.Tensor:
        taken(param)
        data: torch.Tensor = _DATA.__get__(param)
        return data

    def assign(param: torch.Tensor, data: torch.Tensor) -> None:
        taken(param)
        _DATA.__set__(param, data)

    replace(torch.nn.Parameter, "data", property(get, assign), undo)
    _watch_collectives(taken, undo)


def _watch_collectives(taken: Callable[[torch.Tensor], None], undo: ExitStack) -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    check = distributed_c10d._check_single_tensor

    def checked(param: Any, name: str) -> None:
        check(param, name)
        if isinstance(param, torch.nn.Parameter):
            taken(param)

    replace(distributed_c10d, "_check_single_tensor", checked, undo)
