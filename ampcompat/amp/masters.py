"""Float32 masters of half tensors, and the invariant that ties the two: ``half == master.to(half.dtype)`` bitwise.

A master belongs to the model's tensor: it lives beside it, in the module, goes along into deepcopies and pickles, and
is found again by later calls of ``initialize``; optimizers only borrow it. Who writes either side is noticed by version
counters (and, early on, by value), and the side that moved wins, element by element: every element that nobody else
wrote keeps its master's low bits.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state

#: New masters are compared by value, to find writers that move no version counter: in their first rounds, and in
#: the first rounds after each of the first steps (WGAN clips after a step).
EARLY_ROUNDS, EARLY_STEPS = 4, 3


class Master:
    """One half tensor of a model and its float32 master.

    Attributes:
        half: The model's parameter or buffer.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        homes: Where ``half`` lives: weak module references and names (several for tied weights).
    """

    def __init__(self, half: torch.Tensor, value: torch.Tensor | None = None) -> None:
        self.half, self.dtype = half, half.dtype
        with torch.inference_mode(False), torch.no_grad():
            exact = half.detach().float() if value is None else value.detach().to(half.device, torch.float32)
            if exact.data_ptr() == half.data_ptr() or value is not None:
                exact = exact.clone()
        self.value = torch.nn.Parameter(exact, requires_grad=half.requires_grad)
        self.numel = exact.numel()
        self.homes: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self.comparisons, self.early_steps = EARLY_ROUNDS, EARLY_STEPS
        self.written_unseen = False  # somebody writes ``half`` without moving its version: compare for ever
        self.handed_out: torch.Tensor | None = None  # ``half`` as it was when state_dict handed the master out
        self.settle()
        self.register()

    def register(self) -> None:
        """Be found by either side (again, after the index was reset)."""
        by_half()[self.half] = by_value()[self.value] = weakref.ref(self)

    def settle(self) -> None:
        """Take both sides as they are now for equal."""
        self.seen = (self.half._version, self.value._version, self.half.data_ptr())
        self.handed_out = None

    def moved(self) -> bool:
        """Whether either side was written since :meth:`settle`, as far as version counters tell."""
        return (self.half._version, self.value._version, self.half.data_ptr()) != self.seen

    def hand_out(self) -> torch.Tensor:
        """The master itself, for a state dict: writing into it moves the model at the next forward or step."""
        if self.handed_out is None:
            self.handed_out = self.half.detach().clone()
        return self.value.detach()

    def push(self) -> None:
        """Write the master into the model."""
        with torch.no_grad():
            self.half.copy_(self.value)
        self.settle()

    def pull(self) -> None:
        """Take the model's elements into the master where they differ; the others keep the master's low bits."""
        with torch.no_grad():
            self.value.copy_(torch.where(self.value.to(self.half.dtype) == self.half, self.value, self.half.float()))
            self.half.copy_(self.value)  # NaN compares unequal to itself; this also brings -0.0 and 0.0 together
        self.settle()

    def reconcile(self) -> None:
        """Restore the invariant after a move of either side."""
        if self.value.device != self.half.device:
            self._follow_device()
        if self.half.dtype != self.dtype:
            warn_once(
                "master dtype",
                f"A weight that amp.initialize had cast to {self.dtype} is {self.half.dtype} now - the model's dtype is"
                " amp's business at O2 - do not call .half(), .float() or .to(dtype) after amp.initialize.",
            )
            self.dtype = self.half.dtype
        half_version, value_version, pointer = self.seen
        half_moved = self.half._version != half_version or self.half.data_ptr() != pointer
        value_moved = self.value._version != value_version
        if half_moved and value_moved and self.handed_out is not None and self.handed_out.device == self.half.device:
            with torch.no_grad():
                self.value.copy_(torch.where(self.half == self.handed_out, self.value, self.half.float()))
            self.push()
        elif value_moved and not half_moved:
            self.push()
        else:
            self.pull()

    def compare(self) -> bool:
        """Restore the invariant where values alone show that it broke. Reads the device: one host sync.

        Returns:
            Whether it had broken.
        """
        self.comparisons -= self.comparisons > 0
        with torch.no_grad():
            if torch.equal(_bits(self.value.to(self.half.dtype)), _bits(self.half.detach())):
                return False
        self.written_unseen = True
        self.pull()
        return True

    def _follow_device(self) -> None:
        """``module.to(device)`` moves the model's side only; the master keeps its identity and moves after."""
        warn_once(
            "master device",
            f"The model moved from {self.value.device} to {self.half.device} after amp.initialize - its master weights"
            " follow, but optimizer state does not - move the model before amp.initialize.",
        )
        version = self.value._version
        self.value.data = self.value.data.to(self.half.device)
        if self.value.grad is not None:
            self.value.grad = self.value.grad.to(self.half.device)
        self.seen = (self.seen[0], self.value._version if self.seen[1] == version else self.seen[1], self.seen[2])

    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        if id(self) in memo:
            found: Master = memo[id(self)]
            return found
        if self.moved():
            self.reconcile()
        half = copy.deepcopy(self.half, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module: it is never stepped
        clone = memo[id(self)] = Master(half, self.value)
        homes = ((memo.get(id(home())), name) for home, name in self.homes)
        clone.homes = [(weakref.ref(module), name) for module, name in homes if module is not None]
        return clone

    def __reduce__(self) -> Any:
        if self.moved():
            self.reconcile()
        return Master, (self.half, self.value.detach())


def by_half() -> Any:
    """Weak references to masters by the model's half tensor."""
    return state.room("masters by half", WeakIdKeyDictionary)


def by_value() -> Any:
    """Weak references to masters by the float32 tensor that stands in optimizers."""
    return state.room("masters by value", WeakIdKeyDictionary)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def push_all(masters: list[Master]) -> None:
    """Write masters that an optimizer stepped into the model, in fused passes."""
    halves: list[torch.Tensor] = [m.half for m in masters]
    values: list[torch.Tensor] = [m.value for m in masters]
    with torch.no_grad():
        torch._foreach_copy_(halves, values)
    for master, half, value in zip(masters, halves, values, strict=True):
        master.seen = (half._version, value._version, half.data_ptr())
        master.handed_out = None
        if master.early_steps:
            master.early_steps -= 1
            master.comparisons = max(master.comparisons, 2)


def reconcile(masters: Iterable[Master]) -> None:
    """Restore the invariant for every one of ``masters``.

    No host sync, except in the first few rounds of a master's life and where somebody was caught writing a model
    tensor without moving its version counter (``p.data.clamp_()``, ``dist.broadcast(p.data)``).
    """
    # Models have thousands of masters and nearly always none of them moved: one pass finds those that need a look.
    for master in [
        m
        for m in masters
        if (m.half._version, m.value._version, m.half.data_ptr()) != m.seen or m.comparisons or m.written_unseen
    ]:
        if master.moved():
            master.reconcile()
        elif not torch.compiler.is_compiling():
            master.compare()
