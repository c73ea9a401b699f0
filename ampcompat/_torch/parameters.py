"""Writes that do not move the version of a tensor: through its ``data``, by collectives, and our own."""

from __future__ import annotations

import weakref
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


# -- writes through ``data`` -------------------------------------------------------------------------------------------
class DataWrites:
    """Counts writes to one tensor that do not move its version: through its ``data``, and what :meth:`add` notes.

    ``tensor.data`` is another tensor at each access, with a version of its own. From a watched parameter, each of them
    shares the version of a counter, as a tensor and its ``detach()`` do: a write through any of them, or through a view
    of one, moves it, also when the script has let go of that tensor.

    While a script or a graph holds such a tensor, the next has another counter: a graph that has saved the one goes
    backward although the other was written, as in plain torch.

    Attributes:
        counter: An empty tensor, whose version counts writes through the latest ``data``.
        latest: What ``data`` gave out last.
        held: The same of earlier tensors that were held when ``data`` was asked for again.
        added: Writes that no version counts any more, or never did.
    """

    __slots__ = ("_seen", "added", "counter", "held", "latest")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.counter = _new_counter(tensor)
        self.latest: weakref.ref[torch.Tensor] | None = None
        self.held: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.added = 0
        self._seen = self._count()

    def _count(self) -> int:
        """How many writes there were."""
        count: int = self.counter._version + self.added
        for _, counter in self.held:
            count += counter._version
        return count

    @property
    def happened(self) -> bool:
        """Whether there was a write since the last :meth:`forget`."""
        return self._count() != self._seen

    def add(self) -> None:
        """Count a write that torch does not count."""
        self.added += 1

    def forget(self) -> None:
        """Make what was written so far count no more."""
        self._seen = self._count()

    def data_of(self, param: torch.Tensor) -> torch.Tensor:
        """``param.data``, writes through which count."""
        if self.latest is not None and self.latest() is not None:
            self._hold(self.latest)
        data = self.counter.detach()
        _DATA.__set__(data, param)
        self.latest = weakref.ref(data)
        return data

    def _hold(self, latest: weakref.ref[torch.Tensor]) -> None:
        """Keep the counter of ``latest``, which is held, beside a new one; add up those of tensors that are gone."""
        held = []
        for data, counter in self.held:
            if data() is None:
                self.added += counter._version
            else:
                held.append((data, counter))
        held.append((latest, self.counter))
        self.held = held
        self.counter = _new_counter(self.counter)


def _new_counter(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that can take the place of one like ``tensor``."""
    with torch.inference_mode(False):  # tensors of inference mode have no version
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def watch_parameter_data(writes_of: Callable[[torch.Tensor, bool], DataWrites | None], undo: ExitStack) -> None:
    """Count writes through ``param.data`` of each ``Parameter`` that has :class:`DataWrites`.

    Before ``param.data`` is read or assigned, ``writes_of(param, is_assigned)`` returns them, or None. To assign it is
    a write.

    A property of ``torch.nn.Parameter``, and no subclass: torch compares ``type(p)`` with ``Parameter`` where it takes
    its fast paths, and ``Parameter(p)`` refuses a ``p`` of another class.
    """

    def get(param: torch.Tensor) -> torch.Tensor:
        writes = writes_of(param, False)
        if writes is not None and _can_share_version():
            return writes.data_of(param)
        if writes is not None:
            writes.add()  # there may be one, which would not be counted
        plain: torch.Tensor = _DATA.__get__(param)
        return plain

    def assign(param: torch.Tensor, data: torch.Tensor) -> None:
        writes = writes_of(param, True)
        _DATA.__set__(param, data)
        if writes is not None:
            writes.add()

    replace(torch.nn.Parameter, "data", property(get, assign), undo)


# Bound once: each ``param.data`` asks them.
_tracing_state: Final = torch._C._get_tracing_state
_transform: Final = torch._C._functorch.peek_interpreter_stack
_number_of_modes: Final = torch._C._len_torch_dispatch_stack


def _can_share_version() -> bool:
    """Whether nothing is active that would record or refuse it when two tensors are made to share a version."""
    if _tracing_state() is not None or _transform() is not None:
        return False
    if not _number_of_modes():
        return True
    modes = torch._C._TorchDispatchModeKey
    return torch._C._get_dispatch_mode(modes.FAKE) is None and torch._C._get_dispatch_mode(modes.PROXY) is None


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
