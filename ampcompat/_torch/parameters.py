"""Writes that move no version: through ``param.data``, and of our own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch

from ampcompat._torch.patch import replace

_DATA: Any = vars(torch._C.TensorBase)["data"]

_set_version: Any = torch._C._autograd._unsafe_set_version_counter


def _set_versions_one_by_one(tensors: list[torch.Tensor], versions: list[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=True):
        _set_version(tensor, version)


_TAKES_LISTS: Final = "arg0: torch.Tensor," not in str(_set_version.__doc__)  # not in torch 2.4
#: ``(tensors, versions)``: set the versions of tensors, as from before a write that is to move none, like one through
#: ``data``. Cheaper than to write to an alias of each. To exclude dispatch keys would not do: kernels of CUDA's foreach
#: ops move versions themselves.
set_versions: Callable[[list[torch.Tensor], list[int]], None]
set_versions = _set_version if _TAKES_LISTS else _set_versions_one_by_one


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
