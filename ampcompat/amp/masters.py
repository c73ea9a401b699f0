"""Float32 masters of half tensors, and the invariant that ties the two: ``half == master.to(half.dtype)`` bitwise.

A master belongs to the model's tensor: it lives beside it, in the module, goes along into deepcopies and pickles, and
is found again by later calls of ``initialize``; optimizers only borrow it. Who writes either side is noticed by version
counters (and, early on, by value), and the side that moved wins, element by element: every element that nobody else
wrote keeps its master's low bits.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp import module_moves
from ampcompat.amp.bits import bits, fingerprint

#: New masters are compared by value, to find writers that move no version counter: in their first rounds, and in
#: the first rounds after each of the first steps (WGAN clips after a step).
EARLY_ROUNDS, EARLY_STEPS = 4, 3


class Master:
    """One half tensor of a model and its float32 master.

    Attributes:
        half: The model's parameter or buffer.
        value: The master: a float32 ``Parameter`` of the same shape and device.
        folded: The gradient of ``half`` that a block has added to that of ``value``, until it is dropped.
        spent: Whether some optimizer has stepped with the gradient of ``value``.
        homes: Where ``half`` lives: weak module references and names (several for tied weights).

    Args:
        half: The model's parameter or buffer.
        value: What the master starts from; None: from ``half``.
        adopt: ``value`` itself becomes the master.
    """

    def __init__(self, half: torch.Tensor, value: torch.Tensor | None = None, adopt: bool = False) -> None:
        self.half, self.dtype = half, half.dtype
        if value is not None and adopt:
            self.value = value
        else:
            self.value = _make_value(half, value)
        self.numel = half.numel()
        self.folded: torch.Tensor | None = None
        self.spent = False
        self.homes: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self.place: tuple[dict[str, Any], str] = {}, ""  # where the first home keeps ``half``, once it was looked up
        # A buffer's forward goes by the half side; the master is brought up to date when it is read (``absorb``).
        self.is_buffer = not isinstance(half, torch.nn.Parameter)
        self.comparisons, self.early_steps = (0, 0) if self.is_buffer else (EARLY_ROUNDS, EARLY_STEPS)
        self.written_unseen = False  # somebody writes ``half`` without moving its version: compare for ever
        self.handed_out: torch.Tensor | None = None  # ``half`` as it was when state_dict handed the master out
        self.before_writes: torch.Tensor | None = None  # the master before others wrote ``half``, until the next step
        self.settle()
        self.register()

    def register(self) -> None:
        """Be found by either side (again, after the index was reset)."""
        by_half()[id(self.half)] = by_value()[id(self.value)] = self

    def retire(self) -> None:
        """The model's tensor is float32 again: it has no master, though optimizers may still hold this one."""
        by_half().pop(id(self.half), None)

    def settle(self) -> None:
        """Take both sides as they are now for equal."""
        self.seen = (self.half._version, self.value._version, self.half.data_ptr())
        self.handed_out = None
        if self.comparisons or self.written_unseen:
            self.fingerprint = fingerprint(self.half)

    def moved(self) -> bool:
        """Whether either side was written since :meth:`settle`, or may have been through a tensor handed out."""
        versions = (self.half._version, self.value._version, self.half.data_ptr())
        return versions != self.seen or self.handed_out is not None

    def stepped(self) -> None:
        """An optimizer moved the master and :func:`push_all` wrote it to the model."""
        self.before_writes = None
        if self.early_steps:
            self.early_steps -= 1
            self.comparisons = max(self.comparisons, 2)
        self.settle()

    def hand_out(self) -> torch.Tensor:
        """The master itself, for a state dict or ``master_params``: what is written into it moves the model.

        ``.data.copy_()`` moves no version counter, so the model's side is kept as it is now: at the next forward or
        step, elements in which the model has not moved since come from the master.
        """
        if self.handed_out is None:
            self.handed_out = self.half.detach().clone()
        return self.value.detach()

    @torch.no_grad()
    def push(self) -> None:
        """Write the master into the model."""
        self.before_writes = None
        self.half.copy_(self.value)
        self.settle()

    @torch.no_grad()
    def pull(self, stepping: bool = False) -> None:
        """Take the model's elements into the master where they differ; the others keep the master's low bits."""
        self._take(self.value.to(self.half.dtype) == self.half, not stepping)
        self.half.copy_(self.value)  # NaN compares unequal to itself; this also brings -0.0 and 0.0 together
        self.settle()

    def _take(self, kept: torch.Tensor, keep_before: bool) -> None:
        """Take the model's elements into the master where not ``kept``.

        What was written and is then written back (an attack on the weights, an average that is evaluated) gets the
        master back that it had, not the rounded one: else updates below the rounding were lost each time.
        """
        taken, before = self.half.float(), self.before_writes
        if before is not None and before.device == taken.device and before.shape == taken.shape:
            taken = torch.where(before.to(self.half.dtype) == self.half, before, taken)
        elif keep_before and not self.is_buffer:
            self.before_writes = self.value.detach().clone()
        self.value.copy_(torch.where(kept, self.value, taken))

    @torch.no_grad()
    def reconcile(self, stepping: bool = False) -> None:
        """Restore the invariant after a move of either side.

        One host sync, where the master was handed out and no step follows.

        Args:
            stepping: A step follows: nobody will write back what was there before.
        """
        if self.value.device != self.half.device:
            module_moves.follow_device(self)
        if self.half.dtype != self.dtype:
            module_moves.keep_dtype(self)
        half_version, value_version, pointer = self.seen
        half_moved = self.half._version != half_version or self.half.data_ptr() != pointer
        value_moved = self.value._version != value_version
        snapshot = self.handed_out
        if snapshot is not None and snapshot.device == self.half.device and snapshot.shape == self.half.shape:
            still = bits(self.half.detach()) == bits(snapshot)
            if not (stepping or half_moved or value_moved or _torch.in_fake_mode()):
                half_written = not bool(still.all())
                self.written_unseen = self.written_unseen or half_written
            else:
                half_written = half_moved
            self._take(still, keep_before=half_written and not stepping)
            # Where no counter moved there is most likely nothing new: a graph that holds the weight stays valid.
            (self.half if half_moved or value_moved else self.half.data).copy_(self.value)
            self.settle()
        elif value_moved and not half_moved:
            self.push()
        else:
            self.pull(stepping)

    @torch.no_grad()
    def compare(self, stepping: bool = False) -> bool:
        """Restore the invariant where values alone show that it broke. Reads the device: one host sync.

        Args:
            stepping: As in :meth:`reconcile`.

        Returns:
            Whether it had broken.
        """
        self.comparisons -= self.comparisons > 0
        if torch.equal(bits(self.value.to(self.half.dtype)), bits(self.half.detach())):
            return False
        if self.is_buffer:
            self.absorb()
            return True
        self.written_unseen = True
        if torch.equal(fingerprint(self.half), self.fingerprint):
            self.push()  # it was the master that somebody wrote: ``group["params"][0].data.mul_()``
        else:
            self.pull(stepping)
        return True

    @torch.no_grad()
    def absorb(self) -> None:
        """Before ``value`` is saved or copied: take what was written into ``half``, moving its version counter or not.

        Reads the device for a parameter: one host sync.
        """
        if self.moved():
            self.reconcile()
        elif torch.compiler.is_compiling() or _torch.in_fake_mode():
            return
        elif not self.is_buffer:
            self.compare()
        else:
            same = self.value.to(self.half.dtype) == self.half
            self.value.copy_(torch.where(same, self.value, self.half.float()))
            self.seen = (self.half._version, self.value._version, self.half.data_ptr())

    def __deepcopy__(self, memo: dict[int, Any]) -> Master:
        if id(self) in memo:
            found: Master = memo[id(self)]
            return found
        self.absorb()
        # Both sides through the memo: an optimizer copied along goes on holding the copy's masters.
        half, value = copy.deepcopy(self.half, memo), copy.deepcopy(self.value, memo)
        if not _torch.has_storage(half):
            return self  # a compiler's stand-in for the module: it is never stepped
        clone = memo[id(self)] = Master(half, value, adopt=True)
        homes = ((memo.get(id(home())), name) for home, name in self.homes)
        clone.homes = [(weakref.ref(module), name) for module, name in homes if module is not None]
        return clone

    def __reduce__(self) -> Any:
        self.absorb()
        # The master itself: an optimizer in the same file goes on holding it.
        return Master, (self.half, self.value, True)


@torch.inference_mode(False)
@torch.no_grad()
def _make_value(half: torch.Tensor, value: torch.Tensor | None) -> torch.nn.Parameter:
    exact = half.detach().float() if value is None else value.detach().to(half.device, torch.float32)
    if exact.data_ptr() == half.data_ptr() or value is not None:
        exact = exact.clone()
    return torch.nn.Parameter(exact, requires_grad=half.requires_grad)


def by_half() -> weakref.WeakValueDictionary[int, Master]:
    """Masters by the id of the model's half tensor; who looks there makes sure that the master still has that one."""
    found: weakref.WeakValueDictionary[int, Master] = state.room("masters by half", weakref.WeakValueDictionary)
    return found


def by_value() -> weakref.WeakValueDictionary[int, Master]:
    """Masters by the id of the float32 tensor that stands in optimizers, likewise."""
    found: weakref.WeakValueDictionary[int, Master] = state.room("masters by value", weakref.WeakValueDictionary)
    return found
