"""Writes that do not move the version of a tensor: through its ``data``, by collectives, and our own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, Final, Protocol

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


# -- writes through ``data`` -------------------------------------------------------------------------------------------
_REUSABLE: Final = hasattr(torch.Tensor, "_use_count")


def _count_alone(holder: Any) -> int:
    """What ``getrefcount`` says of an object that an attribute and a local name hold; Python 3.14 borrows for names."""
    latest = holder.latest
    count = getrefcount(latest)
    return count if latest is not None else 0


_ALONE: Final = _count_alone(SimpleNamespace(latest=object()))


class DataWrites:
    """Knows of writes to one tensor that do not move its version: through its ``data``, and what :meth:`add` notes.

    ``tensor.data`` is another tensor at each access, with a version of its own. What was given out is kept: if its
    version has moved, the tensor was written. One that nothing else holds, and that was not written, is given out again.

    Attributes:
        latest: What ``data`` gave out last.
        version: Its version then.
        held: Earlier ones that were held when ``data`` was asked for again, with their versions.
        happened_before: Whether there was a write through one that is not kept any more, or one that was noted.
    """

    __slots__ = ("happened_before", "held", "latest", "version")

    def __init__(self) -> None:
        self.latest: torch.Tensor | None = None
        self.version = 0
        self.held: list[tuple[torch.Tensor, int]] = []
        self.happened_before = False

    @property
    def happened(self) -> bool:
        """Whether there was a write since the last :meth:`forget`."""
        latest = self.latest
        if self.happened_before or (latest is not None and latest._version != self.version):
            return True
        return any(data._version != version for data, version in self.held)

    def add(self) -> None:
        """Note a write that torch does not count."""
        self.happened_before = True

    def forget(self) -> None:
        """Make what was written so far count no more; keep what a script, a view or a graph still holds."""
        self.happened_before = False
        if self.latest is not None:
            self.version = self.latest._version
        if self.held:
            self.held = [(data, data._version) for data, _ in self.held if getrefcount(data) > _ALONE or _is_used(data)]

    def data_of(self, param: torch.Tensor) -> torch.Tensor:
        """``param.data``, writes through which are known."""
        latest = self.latest
        if latest is not None:
            if (
                latest._version == self.version
                and getrefcount(latest) == _ALONE  # this attribute and this name
                and _REUSABLE
                and latest._use_count() == 1  # no view, no graph
                and latest.data_ptr() == param.data_ptr()
                and not latest.requires_grad
            ):
                return latest
            self.held.append((latest, self.version))
        latest = self.latest = _DATA.__get__(param)
        self.version = latest._version
        return latest


def _is_used(data: torch.Tensor) -> bool:
    """Whether a view or a graph holds ``data``."""
    return not _REUSABLE or data._use_count() > 1


class Owner(Protocol):
    """What knows of the writes to a parameter."""

    def data_of(self, param: torch.Tensor) -> torch.Tensor:
        """``param.data``, about to be given out."""

    def note_assigned(self, param: torch.Tensor) -> None:
        """Note that ``param.data`` was assigned."""


def watch_parameter_data(owners: weakref.WeakValueDictionary[int, Any], undo: ExitStack) -> None:
    """Have ``owners``, by the id of their parameters, know of reads and writes of ``param.data``.

    A property of ``torch.nn.Parameter``, and no subclass: torch compares ``type(p)`` with ``Parameter`` where it takes
    its fast paths, and ``Parameter(p)`` refuses a ``p`` of another class.
    """
    references = owners.data  # each ``param.data`` asks: half the time of ``owners.get``
    plain = _DATA.__get__

    def get(param: torch.Tensor) -> torch.Tensor:
        reference = references.get(id(param))
        if reference is None:
            return plain(param)  # type: ignore[no-any-return]
        owner: Owner | None = reference()
        return plain(param) if owner is None else owner.data_of(param)

    def assign(param: torch.Tensor, data: torch.Tensor) -> None:
        owner: Owner | None = owners.get(id(param))
        _DATA.__set__(param, data)
        if owner is not None:
            owner.note_assigned(param)

    replace(torch.nn.Parameter, "data", property(get, assign), undo)


# -- collectives -------------------------------------------------------------------------------------------------------
def memory_of(tensor: torch.Tensor) -> int | None:
    """Return what identifies the memory of ``tensor``, also that of its views and aliases; None if it has none."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    memory: int = tensor.untyped_storage()._cdata
    return memory


def watch_collectives(handed_over: Callable[[torch.Tensor], None], undo: ExitStack) -> None:
    """Call ``handed_over(tensor)`` before a collective gets ``tensor``, which it may write without moving a version."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    check = distributed_c10d._check_single_tensor

    def checked(tensor: Any, name: str) -> None:
        check(tensor, name)
        handed_over(tensor)

    replace(distributed_c10d, "_check_single_tensor", checked, undo)
