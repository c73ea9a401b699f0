"""Keep of a forward what running it again takes: references to its inputs, and the random states it drew from."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ampcompat.tools.core import Args, Kwargs, LossScaler, Optimizer, numbers_of, tensors_in
from ampcompat.tools.explain.attributes import attributes_put_back
from ampcompat.tools.frames import script_line
from ampcompat.tools.generators import random_state, set_random_state
from ampcompat.tools.tensors import readable

#: Buffers are copied at a forward up to so many bytes a model.
MOST_BUFFER_BYTES = 32 * 2**20
#: How far a result may be from the same one, computed in half in another order, of the largest.
ROUNDING = 0.01


class Block:
    """One block of ``scale_loss``.

    Args:
        scaler: Its loss scaler.
        optimizers: Its optimizers.
    """

    def __init__(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        self.scaler = scaler
        self.optimizers = frozenset(map(id, optimizers))
        self._numbers = numbers_of(scaler)  # on their way to the host

    @property
    def scale(self) -> float:
        """The loss scale that it began with."""
        numbers = self._numbers
        return (numbers if isinstance(numbers, tuple) else numbers.read())[0]


class Forward:
    """One forward of an initialized model.

    Attributes:
        model: Weak reference to it.
        outputs: Its outputs, and their versions when it ended.
        grads: Gradients of those that want one, in their order, as the backward brought them.
        owners: ids of the optimizers in whose blocks the gradients came.
        block: The last of these blocks; None before.
        age: Steps since.
        called_at: The script's line that called it; None where the script has none on the stack.
    """

    def __init__(self, model: torch.nn.Module, args: Args, kwargs: Kwargs, buffers: BufferCopies) -> None:
        self.model = weakref.ref(model)
        self.args, self.kwargs = args, kwargs
        self.versions = _versions((args, kwargs))
        self.weight_versions = _weight_versions(model)
        self.random = random_state(_cuda_devices(model))
        self.buffers = buffers.take()
        self.outputs: list[tuple[torch.Tensor, int]] = []
        self.grads: list[torch.Tensor | None] = []
        self.owners: set[int] = set()
        self.block: Block | None = None
        self.age = 0
        self.called_at = script_line(sys._getframe(1))

    def end(self, outputs: list[torch.Tensor]) -> None:
        """Note what it has returned."""
        self.outputs = [(tensor.detach(), tensor._version) for tensor in outputs if not tensor.is_inference()]

    def has_returned(self, outputs: list[torch.Tensor]) -> bool:
        """Whether ``outputs``, of running it again, are its own. One host sync an output."""
        again = [tensor.detach() for tensor in outputs if not tensor.is_inference()]
        pairs = zip(self.outputs, again, strict=False)
        return len(again) == len(self.outputs) and all(
            tensor._version != version or _is_same(tensor, one) for (tensor, version), one in pairs
        )

    @property
    def is_as_it_was(self) -> bool:
        """Whether its inputs and its model's weights are those that it ran with: nothing has written them since."""
        model = self.model()
        is_same_batch = _versions((self.args, self.kwargs)) == self.versions
        return is_same_batch and model is not None and _weight_versions(model) == self.weight_versions


def _is_same(tensor: torch.Tensor, again: torch.Tensor) -> bool:
    """Whether ``again`` is ``tensor``, up to what another order of sums makes."""
    if tensor.shape != again.shape or tensor.dtype != again.dtype:
        return False
    if not readable(tensor) or tensor.numel() == 0:
        return tensor.layout != torch.strided or tensor.device.type == "meta" or torch.equal(tensor, again)
    finite = torch.isfinite(tensor)
    if not torch.equal(finite, torch.isfinite(again)):
        return False
    values = tensor[finite].double()
    difference = (values - again[finite].double()).abs()
    return not len(values) or float(difference.max()) <= ROUNDING * float(values.abs().max())


class BufferCopy(NamedTuple):
    """Hold the value that a buffer had at some version."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor


class BufferCopies:
    """Copies of the buffers of one model as its last forward found them.

    Those of batch norms are left out: in training none is read.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.homes = [
            (weakref.ref(module), name)
            for module in model.modules()
            if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.copies: dict[int, BufferCopy] = {}  # by id of the buffer

    def take(self) -> list[BufferCopy]:
        """Copy those that were written since the last time, those most often written first as far as there is room."""
        found = [module._buffers.get(name) for ref, name in self.homes if (module := ref()) is not None]
        buffers = [buffer for buffer in found if buffer is not None and not buffer.is_inference()]
        room = MOST_BUFFER_BYTES
        copies = {}
        for buffer in sorted(buffers, key=lambda buffer: -buffer._version):
            room -= buffer.numel() * buffer.element_size()
            if room < 0:
                break
            known = self.copies.get(id(buffer))
            if known is None or known.version != buffer._version:
                known = BufferCopy(buffer, buffer._version, buffer.detach().clone())
            copies[id(buffer)] = known
        self.copies = copies
        return list(copies.values())


def _versions(value: object) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors_in(value)]


def _weight_versions(model: torch.nn.Module) -> list[int]:
    """Numbers that change when a weight of ``model`` is written. Runs no op."""
    return [param._version for param in model.parameters()]


def _cuda_devices(model: torch.nn.Module) -> list[torch.device]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


@contextlib.contextmanager
def as_it_was(forward: Forward, model: torch.nn.Module) -> Iterator[None]:
    """Inside: generators and buffers as at the recorded forward. Afterwards: as they were outside, bitwise.

    The buffers inside are copies: a backward of the run that is still to come may need the originals unwritten. What
    else modules hold is put back too.
    """
    outside = random_state([device for device, _ in forward.random.cuda])
    values = {id(copy.buffer): copy.value for copy in forward.buffers}
    copies: dict[int, torch.Tensor] = {}
    homes = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    with attributes_put_back(model):
        for module, name, buffer in homes:
            if id(buffer) not in copies:
                copies[id(buffer)] = values.get(id(buffer), buffer).detach().clone()
            module._buffers[name] = copies[id(buffer)]
        set_random_state(forward.random)
        try:
            yield
        finally:
            set_random_state(outside)
