"""Keep of a forward what running it again takes: references to its inputs, and the random states it drew from."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ampcompat.amp.amp_model import Args, Kwargs
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.trees import tensors_in
from ampcompat.tools.explain.places import script_line

#: Buffers that a forward writes are copied at each forward, up to so many bytes a model.
MOST_BUFFER_BYTES = 32 * 2**20


class RandomState(NamedTuple):
    """Hold the states of the generators that a forward may draw from; numpy's is None where it is not imported."""

    python: tuple[object, ...]
    numpy: Sequence[object] | None
    cpu: torch.Tensor
    cuda: list[tuple[torch.device, torch.Tensor]]


class Record:
    """One forward of an initialized model.

    Attributes:
        model: Weak reference to it.
        grads: Gradients of its outputs, in their order, as the backward brought them.
        owners: ids of the optimizers in whose blocks the gradients came.
        scaler: The loss scaler of the last of these blocks.
        scale: Its scale then, where it has one.
        age: Steps since.
        called_at: File and line of the script's call; None where the script has none on the stack.
    """

    def __init__(self, model: torch.nn.Module, args: Args, kwargs: Kwargs, buffers: BufferWatch) -> None:
        self.model = weakref.ref(model)
        self.args, self.kwargs = args, kwargs
        self.versions = _versions((args, kwargs))
        self.random = random_state(_cuda_devices(model))
        self.buffers = buffers.save()
        self.grads: list[torch.Tensor | None] = []
        self.owners: set[int] = set()
        self.scaler: LossScaler | None = None
        self.scale: torch.Tensor | None = None
        self.age = 0
        self.called_at = script_line(sys._getframe(1))

    @property
    def overwritten(self) -> bool:
        """Whether somebody wrote into the inputs since."""
        return _versions((self.args, self.kwargs)) != self.versions


class BufferWatch:
    """Buffers of one model that forwards write, found by their versions; those of training batch norms do not matter.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.buffers = [
            (module, name)
            for module in model.modules()
            if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.seen = [-1] * len(self.buffers)
        self.moving: set[int] = set()
        self.first = True

    def save(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each written buffer with a copy of its value; the first time, of every one, as far as they are small."""
        saved, room = [], MOST_BUFFER_BYTES
        for index, (module, name) in enumerate(self.buffers):
            buffer = module._buffers.get(name)
            if buffer is None or buffer.is_inference():
                continue
            if buffer._version != self.seen[index]:
                self.moving.add(index)
            self.seen[index] = buffer._version
            room -= buffer.numel() * buffer.element_size() if index in self.moving else 0
            if index in self.moving and room >= 0:
                saved.append((buffer, buffer.detach().clone()))
        if self.first:
            self.first = False
            self.moving.clear()
        return saved


def _versions(value: object) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors_in(value)]


def _cuda_devices(model: torch.nn.Module) -> list[torch.device]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def random_state(devices: list[torch.device]) -> RandomState:
    """The state of every generator that a forward may draw from. No host sync."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        torch.get_rng_state(),
        [(device, torch.cuda.get_rng_state(device)) for device in devices],
    )


def set_random_state(state: RandomState) -> None:
    """Put back what :func:`random_state` read."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
    torch.set_rng_state(cpu)
    for device, one in cuda:
        torch.cuda.set_rng_state(one, device)


@contextlib.contextmanager
def as_it_was(record: Record, model: torch.nn.Module) -> Iterator[None]:
    """Inside: generators and buffers as at the recorded forward. Afterwards: as they were outside, bitwise.

    The buffers inside are copies: a backward of the run that is still to come may need the originals unwritten.
    """
    outside = random_state([device for device, _ in record.random.cuda])
    values = {id(buffer): value for buffer, value in record.buffers}
    copies: dict[int, torch.Tensor] = {}
    homes = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        for module, name, buffer in homes:
            if id(buffer) not in copies:
                copies[id(buffer)] = values.get(id(buffer), buffer).detach().clone()
            module._buffers[name] = copies[id(buffer)]
        set_random_state(record.random)
        yield
    finally:
        set_random_state(outside)
        for module, name, buffer in homes:
            module._buffers[name] = buffer
