"""Parameters: writes that move no version (through ``data``, by collectives, our own), and attributes of scripts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from sys import getrefcount
from typing import Any, Final, Protocol

import torch
from torch.utils.weak import TensorWeakRef

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
    data: torch.Tensor = tensor.data if _has_data_of_its_own(tensor) else _DATA.__get__(tensor)
    return data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, which is not noted."""
    if _has_data_of_its_own(tensor):
        tensor.data = data
    else:
        _DATA.__set__(tensor, data)


def _has_data_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether the class of ``tensor``, of another's making, has a property ``data`` of its own."""
    cls: Any = type(tensor)
    return cls.data is not torch.nn.Parameter.data and cls.data is not _DATA


# -- writes through ``data`` -------------------------------------------------------------------------------------------
# Bound once: each ``param.data`` asks them.
_use_count: Final[Any] = getattr(torch.Tensor, "_use_count", lambda tensor: 2)  # without it, no tensor is given twice
_number_of_modes: Final = torch._C._len_torch_dispatch_stack


class DataWrites:
    """Knows of writes to one tensor that do not move its version: through its ``data``, and what :meth:`add` notes.

    ``tensor.data`` is another tensor at each access, with a version of its own. What was given out is kept: if its
    version has moved, the tensor was written. As long as no script, view or graph holds it, it is given out again.

    Where threads ask at once, callers of all methods but :meth:`given_again` hold one lock.

    Attributes:
        latest: What ``data`` gave out last.
        version: Its version when both copies were equal, or when it was made.
        address: Where its memory is.
        held: Earlier ones that were held when ``data`` was asked for again, with their versions.
        happened_before: Whether there was a write through one that is not kept any more, or one that was noted.
    """

    __slots__ = ("address", "happened_before", "held", "latest", "version")

    def __init__(self) -> None:
        self.latest: torch.Tensor | None = None
        self.version = 0
        self.address = 0
        self.held: list[tuple[torch.Tensor, int]] = []
        self.happened_before = False

    @property
    def happened(self) -> bool:
        """Whether there was a write since the last :meth:`forget`."""
        latest = self.latest
        if self.happened_before or (latest is not None and latest._version != self.version):
            return True
        if not self.held:
            return False
        return any(data._version != version for data, version in self.held)

    def add(self) -> None:
        """Note a write that torch does not count."""
        self.happened_before = True

    def forget(self) -> None:
        """Forget what was written so far; keep what a script, a view or a graph still holds."""
        self.happened_before = False
        if self.latest is not None:
            self.version = self.latest._version
        if self.held:
            references = [TensorWeakRef(data) for data, _ in self.held]
            self.held = []
            held = [data for reference in references if (data := reference()) is not None]
            self.held = [(data, data._version) for data in held]

    def given_again(self, param: torch.Tensor) -> torch.Tensor | None:
        """``param.data`` as it was given out last, if it can be given out again; None otherwise."""
        latest = self.latest
        if (
            latest is not None
            and getrefcount(latest) == _references_alone  # no script holds it
            and _use_count(latest) == 1  # nor a view or a graph
            and param.data_ptr() == self.address
            and not latest.requires_grad
        ):
            return latest
        return None

    def give_out(self, param: torch.Tensor) -> torch.Tensor:
        """``param.data`` as torch makes it, writes through which are known."""
        data: torch.Tensor = _DATA.__get__(param)
        is_stand_in = _number_of_modes() > 0 and type(data) is not torch.Tensor
        if is_stand_in:
            return data
        self._set_latest_aside()
        self.latest = data
        self.version = data._version
        self.address = data.data_ptr()
        return data

    def _set_latest_aside(self) -> None:
        """Keep ``latest`` among what is held, if anything holds it."""
        latest = self.latest
        if latest is None:
            return
        if latest._version != self.version:
            self.happened_before = True
        reference = TensorWeakRef(latest)
        self.latest = None
        del latest
        held = reference()
        if held is not None:
            self.held.append((held, self.version))


def _is_given_again() -> bool:
    """Whether :class:`DataWrites` gives out a tensor again that nothing else holds."""
    param = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)
    writes = DataWrites()
    first = id(writes.give_out(param))
    return id(writes.given_again(param)) == first


# What ``getrefcount`` says of that tensor depends on the interpreter: from Python 3.14 on, some names only borrow. So
# the line that asks is tried, once. With another number than this, no tensor is given out again.
with torch.inference_mode(False):
    for _references_alone in range(1, 6):
        if _is_given_again():
            break


class Owner(Protocol):
    """What knows of the writes to a parameter."""

    def data_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return ``param.data``, which a script asks for."""

    def note_assigned(self, param: torch.Tensor) -> None:
        """Note that ``param.data`` was assigned."""


def watch_parameter_data(find_owners: Callable[[], weakref.WeakValueDictionary[int, Any]], undo: ExitStack) -> None:
    """Let the owners of parameters answer for ``param.data``, and note what it is set to.

    ``find_owners`` returns them by the ids of their parameters; it is called once.

    A property of ``torch.nn.Parameter``, and no subclass: torch compares ``type(p)`` with ``Parameter`` where it takes
    its fast paths, and ``Parameter(p)`` refuses a ``p`` of another class.
    """
    owners = find_owners()
    # Each ``param.data`` looks up here, in half the time of ``owners.get``.
    references: dict[int, weakref.ref[Owner]] = vars(owners)["data"]
    plain: Callable[[torch.Tensor], torch.Tensor] = _DATA.__get__

    def get(param: torch.Tensor) -> torch.Tensor:
        reference = references.get(id(param))
        if reference is None:
            return plain(param)
        owner: Owner | None = reference()
        return plain(param) if owner is None else owner.data_of(param)

    def assign(param: torch.Tensor, data: torch.Tensor) -> None:
        owner: Owner | None = owners.get(id(param))
        _DATA.__set__(param, data)
        if owner is not None:
            owner.note_assigned(param)

    replace(torch.nn.Parameter, "data", property(get, assign), undo)


# -- attributes --------------------------------------------------------------------------------------------------------
def share_attributes(param: torch.Tensor, source: torch.Tensor) -> None:
    """Give the parameter ``param`` what a script has put on ``source``, or puts there later, and its class.

    The class is not given where its instances are more than a ``Parameter`` with attributes: wrappers around other
    tensors, or objects with another layout in memory.
    """
    cls: Any = type(source)
    is_wrapper = cls.__torch_dispatch__ is not torch.nn.Parameter.__torch_dispatch__
    if type(param) is not cls and not is_wrapper:
        with suppress(TypeError):
            param.__class__ = cls
    param.__dict__ = source.__dict__


# -- collectives -------------------------------------------------------------------------------------------------------
def memory_of(tensor: torch.Tensor) -> int | None:
    """Return what identifies the memory of ``tensor``, which views and aliases share; None if it has no memory."""
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
