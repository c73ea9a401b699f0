"""The watch over the first blocks of a run, and their steps: it looks for mistakes that leave no trace in plain torch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.gradients import Block, pending_in
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.unscaling import entries_of

#: How many blocks are watched for each loss: a hook on the loss takes a tenth of a millisecond of a backward pass.
WATCHED = 16

def watch_more(losses: int) -> None:
    """Watch the next blocks, for ``losses`` losses of a call of ``initialize``."""
    if state.watch is None:
        state.watch = Watch()
    state.watch.blocks_left += WATCHED * losses


class _Bystander(NamedTuple):
    """A gradient that waits for the step of another optimizer while a block is open, and its version before."""

    optimizer: Optimizer
    param: torch.Tensor
    grad: torch.Tensor
    version: int

    def is_there(self) -> bool:
        """Whether the gradient was not cleared or replaced."""
        return self.param.grad is self.grad


class _Expected(NamedTuple):
    """What the watch looks for while a block is open.

    Attributes:
        backward_calls: One True for each backward pass of the scaled loss; None where it needs no gradient.
        bystanders: A gradient of each other optimizer that has yet to step.
    """

    backward_calls: list[bool] | None
    bystanders: list[_Bystander]


@dataclass(eq=False)
class _Record:
    """What the watch knows of one optimizer.

    Attributes:
        had_block: Whether there was a block since the last step.
        had_gradients: Whether such a block gave any gradients.
        used: The gradients in the model at the last step: a later step that finds one of them has no new one.
        half_gradients: Id and version of each half gradient that a block has added to a master's.
        sample: The smallest of them, and a copy: what is written through ``.data`` moves no version.
        foreign: A gradient that a block of another optimizer has added to.
    """

    had_block: bool = False
    had_gradients: bool = False
    used: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    half_gradients: dict[Master, tuple[int, int]] = field(default_factory=dict)
    sample: tuple[Master, torch.Tensor] | None = None
    foreign: _Bystander | None = None

    def was_used(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` was there at the last step."""
        return any(_torch.tensor_of(used) is gradient for used in self.used)

    def forget_half_gradients(self, masters: Sequence[Master]) -> None:
        """Forget what was in the half gradients of ``masters``."""
        for master in masters:
            self.half_gradients.pop(master, None)
        if self.sample is not None and self.sample[0] not in self.half_gradients:
            self.sample = None


class Watch:
    """Look for mistakes in the first blocks; blocks and steps call it as long as ``state.watch`` is there.

    Host syncs: only to tell a gradient that was zeroed from one that was edited.

    Attributes:
        blocks_left: How many blocks it has yet to see.
    """

    def __init__(self) -> None:
        self.blocks_left = 0
        self._records: weakref.WeakKeyDictionary[Optimizer, _Record] = weakref.WeakKeyDictionary()
        self._expected: dict[Block, _Expected] = {}
        self._taken_before: set[Master] = set()
        self._comparisons: list[_torch.HostCopy] = []  # of half gradients with their copies, on their way to the host

    def _record_of(self, optimizer: Optimizer) -> _Record:
        return self._records.setdefault(optimizer, _Record())

    # -- a block -------------------------------------------------------------------------------------------------------
    def look_before_block(self, optimizer: Optimizer) -> None:
        """Look at what is in the gradients of ``optimizer`` before a block saves them."""
        record = self._record_of(optimizer)
        stash: AmpOptimizerState = optimizer._amp_stash
        self._look_at_edits(record)
        self._look_at_foreign(record)
        if not record.had_block:
            _look_at_plain_gradients(stash.leaves.masters, record)

    def look_at_loss(self, block: Block, scaled: torch.Tensor) -> None:
        """Follow the backward passes of the ``scaled`` loss of ``block``."""
        calls: list[bool] = []
        if scaled.requires_grad:
            scaled.register_hook(lambda _grad: calls.append(True))  # type: ignore[no-untyped-call]
        bystanders = [] if block.scalers[0].is_one else self._find_bystanders(block)
        self._expected[block] = _Expected(calls if scaled.requires_grad else None, bystanders)

    def _find_bystanders(self, block: Block) -> list[_Bystander]:
        """One gradient of each other optimizer that has yet to step with it."""
        found = []
        for other in state.optimizers.listed():
            leaves = other._amp_stash.leaves
            waits = other not in block.optimizers and self._record_of(other).had_gradients
            if not waits or block.overlaps(leaves) or pending_in(leaves) or other._amp_stash.in_block:
                continue
            param = next((param for param in leaves.direct if param.grad is not None), None)
            if param is not None and param.grad is not None:
                found.append(_Bystander(other, param, param.grad, param.grad._version))
        return found

    def look_after_block(self, block: Block, has_new_grads: bool) -> None:
        """Look at what ``block`` has left, if its gradients were unscaled."""
        expected = self._close(block)
        if has_new_grads and expected.backward_calls == []:
            warn_of("unscaled loss in a block")
        for record in self._records.values():
            record.forget_half_gradients(block.leaves.masters)  # of others that share them
        for optimizer in block.optimizers:
            record = self._record_of(optimizer)
            record.had_block = True
            record.had_gradients = record.had_gradients or has_new_grads
            _remember_half_gradients(record, optimizer._amp_stash.leaves.masters)

    def note_block(self, block: Block) -> None:
        """Note that ``block`` gives gradients to its optimizers."""
        for optimizer in block.optimizers:
            record = self._record_of(optimizer)
            record.had_block = True
            record.had_gradients = True

    def note_delayed(self, block: Block) -> None:
        """Note that ``block`` has left its gradients scaled."""
        self._close(block)
        self.note_block(block)

    def note_failed(self, block: Block) -> None:
        """Note that ``block`` was left by an exception."""
        self._close(block)

    def _close(self, block: Block) -> _Expected:
        """Note what ``block`` has added to gradients of others, and end the watch after the last block."""
        expected = self._expected.pop(block, _Expected(None, []))
        for bystander in expected.bystanders:
            if bystander.is_there() and bystander.grad._version != bystander.version:
                seen = bystander._replace(version=bystander.grad._version)
                self._record_of(bystander.optimizer).foreign = seen
        self.blocks_left -= 1
        if self.blocks_left <= 0:
            state.watch = None
        return expected

    # -- a step --------------------------------------------------------------------------------------------------------
    def look_before_step(self, optimizer: Optimizer) -> None:
        """Look at the gradients that ``optimizer`` is about to step with."""
        stash: AmpOptimizerState = optimizer._amp_stash
        record = self._record_of(optimizer)
        self._look_at_edits(record)
        self._look_at_foreign(record)
        is_scaled = bool(stash.leaves.masters) or not all(scaler.is_one for scaler in stash.session.scalers)
        gradients = [leaf.grad for leaf in stash.leaves.tensors() if leaf.grad is not None]
        if is_scaled and record.had_block and not record.had_gradients:
            warn_of("block without gradients")
        elif is_scaled and not record.had_block and gradients and not record.was_used(gradients[0]):
            warn_of("no block")
        self._records[optimizer] = _Record(used=list(map(weakref.ref, gradients)))

    def look_before_update(self, masters: Sequence[Master]) -> None:
        """Note whose half weights may have been written before a step, through ``data``."""
        self._taken_before = {master for master in masters if master.half_taken}

    def look_after_update(self, masters: Sequence[Master]) -> None:
        """Look whether a step has written to half weights before ``masters`` are pushed."""
        for master in masters:
            was_taken = master.half_taken and master not in self._taken_before
            if master.half_has_moved or was_taken:
                warn_of("half weights written in a step")

    # -- both ----------------------------------------------------------------------------------------------------------
    def _look_at_edits(self, record: _Record) -> None:
        """Warn where half gradients of ``record`` were written after their block."""
        assigned: list[Master] = []
        edited: list[Master] = []
        for master, (key, version) in record.half_gradients.items():
            grad = master.half.grad
            if grad is None:
                continue
            if id(grad) != key:
                assigned.append(master)
            elif grad._version != version:
                edited.append(master)
        if record.sample is not None and not assigned and not edited:
            self._comparisons.append(_comparison(*record.sample))
        record.half_gradients = {}
        record.sample = None
        while self._comparisons and self._comparisons[0].arrived():
            was_edited = self._comparisons.pop(0).read()[0]
            if was_edited:
                warn_of("half gradients edited")
        if not all(map(_is_zeroed, assigned)):
            warn_of("half gradients assigned")
        if not all(map(_is_zeroed, edited)):
            warn_of("half gradients edited")

    def _look_at_foreign(self, record: _Record) -> None:
        """Warn where another optimizer's block has added to a gradient that is still there."""
        foreign = record.foreign
        record.foreign = None
        if foreign is not None and foreign.is_there() and foreign.grad._version == foreign.version:
            warn_of("scaled gradients of another block")


def _look_at_plain_gradients(masters: Sequence[Master], record: _Record) -> None:
    """Warn of gradients of half weights that no block gave: the block drops them."""
    for master in masters:
        gradient = master.half.grad
        if gradient is None:
            continue
        is_of_no_block = not master.grad_shown and not record.was_used(gradient)
        if is_of_no_block and gradient.any():  # zeros are cleared gradients
            warn_of("plain gradients dropped")
        return


def _remember_half_gradients(record: _Record, masters: Sequence[Master]) -> None:
    """Remember what a block has left in half weights, to notice edits."""
    shown = [master for master in masters if master.grad_shown and master.half.grad is not None]
    record.half_gradients = {master: (id(master.half.grad), master.half.grad._version) for master in shown}  # type: ignore[union-attr]
    dense = [master for master in shown if not master.half.grad.is_sparse]  # type: ignore[union-attr]
    if dense:
        smallest = min(dense, key=lambda master: master.half.numel())
        record.sample = (smallest, smallest.half.grad.detach().clone())  # type: ignore[union-attr]


def _comparison(master: Master, before: torch.Tensor) -> _torch.HostCopy:
    """Whether the half gradient of ``master`` is another than ``before``, on its way to the host."""
    grad = master.half.grad
    if grad is None or grad.shape != before.shape or grad.device != before.device:
        return _torch.HostCopy([before.new_zeros((), dtype=torch.float32)])
    differs = (_torch.bits(grad) != _torch.bits(before)).any()
    return _torch.HostCopy([differs.float()])


def _is_zeroed(master: Master) -> bool:
    """Whether ``zero_grad(set_to_none=False)`` has zeroed both gradients, which is no edit."""
    grads = (master.half.grad, master.value.grad)
    return all(grad is None or not entries_of(grad).any() for grad in grads)
