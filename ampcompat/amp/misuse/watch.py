"""An observer of the first blocks of a run, and of steps up to the one after them: it warns of each mistake once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.masters import Master, half_written
from ampcompat.amp.misuse.half_gradients import HalfGradients
from ampcompat.amp.misuse.unknown_optimizers import Gradients, ScaledForNone
from ampcompat.amp.observers import observer_state
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import OpenBlock, is_in_block
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index

#: How many blocks are watched for each loss: a hook on the loss takes a tenth of a millisecond of a backward pass.
WATCHED = 16


def watch_more(losses: int) -> None:
    """Watch the next blocks, for ``losses`` losses of a call of ``initialize``."""
    watches = _watches()
    if not watches:
        watches = [Watch()]
        observer_state.observers += watches
        state.undo_once(end_watch)
    watches[0].blocks_left += WATCHED * losses


def end_watch() -> None:
    """End the watch, if there is one, and take its hooks away."""
    for watch in _watches():
        watch.end()


def _watches() -> list[Watch]:
    return [observer for observer in observer_state.observers if isinstance(observer, Watch)]


class _Bystander(NamedTuple):
    """A gradient that waits for the step of another optimizer while a block is open, and its version before."""

    optimizer: AmpOptimizer
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
        held_by_none: Gradients of tensors that no optimizer under amp holds.
    """

    backward_calls: list[bool] | None
    bystanders: list[_Bystander]
    held_by_none: Gradients


@dataclass(eq=False)
class _Record:
    """What the watch knows of one optimizer.

    Attributes:
        had_block: Whether there was a block since the last step.
        had_gradients: Whether such a block gave any gradients.
        used: The gradients in the model at the last step: if a later step finds one of these tensors, there was no new
            backward pass.
        writes_own: Whether gradients that came since then may be the script's own: True once it has asked for
            ``master_params`` before there were any, False again after a backward pass.
        backward_hook: The hook that tells of a backward pass.
        foreign: A gradient that a block of another optimizer has added to.
        half_gradients: What blocks have left in its half gradients.
    """

    had_block: bool = False
    had_gradients: bool = False
    used: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    writes_own: bool = False
    backward_hook: RemovableHandle | None = None
    foreign: _Bystander | None = None
    half_gradients: HalfGradients = field(default_factory=HalfGradients)

    def follow_backward(self, leaf: torch.Tensor) -> None:
        """Take the gradients that come now for the script's own, until a backward pass reaches ``leaf``."""
        self.writes_own = True
        self.end_hook()
        hooked = leaf.register_post_accumulate_grad_hook(self._note_backward)  # type: ignore[no-untyped-call]
        self.backward_hook = hooked

    def _note_backward(self, _: torch.Tensor) -> None:
        self.writes_own = False

    def end_hook(self) -> None:
        """Take the hook away."""
        if self.backward_hook is not None:
            self.backward_hook.remove()

    def is_new(self, gradients: list[torch.Tensor]) -> bool:
        """Whether there are ``gradients`` that were not there at the last step."""
        return bool(gradients) and not self.was_used(gradients[0])

    def was_used(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` was there at the last step."""
        return any(_torch.tensor_of(used) is gradient for used in self.used)


class Watch:
    """Look for mistakes in the first blocks, as an observer that takes itself away at the first step after the last.

    Attributes:
        blocks_left: How many blocks it has yet to see.
    """

    def __init__(self) -> None:
        self.blocks_left = 0
        self._records: weakref.WeakKeyDictionary[AmpOptimizer, _Record] = weakref.WeakKeyDictionary()
        self._expected: dict[OpenBlock, _Expected] = {}
        self._scaled_for_none = ScaledForNone()
        self._hooks = ExitStack()
        _torch.call_before_steps(self._scaled_for_none.look, self._hooks)
        state.undo.callback(self._hooks.close)

    def _record_of(self, optimizer: AmpOptimizer) -> _Record:
        return self._records.setdefault(optimizer, _Record())

    # -- a block -------------------------------------------------------------------------------------------------------
    def on_block(self, block: OpenBlock) -> None:
        """Look at the gradients that are there before ``block`` saves them."""
        if block.is_plain:
            return
        for optimizer in block.optimizers:
            record = self._record_of(optimizer)
            record.half_gradients.look()
            _look_at_foreign(record)
            if not record.had_block:
                _look_at_plain_gradients(optimizer._amp_stash.leaves.masters, record)

    def on_scaled_loss(self, block: OpenBlock, scaled: torch.Tensor) -> None:
        """Follow the backward passes of the ``scaled`` loss of ``block``."""
        calls: list[bool] = []
        if scaled.requires_grad:
            scaled.register_hook(lambda _grad: calls.append(True))  # type: ignore[no-untyped-call]
        bystanders = [] if block.scaler.is_one else self._find_bystanders(block)
        held_by_none = self._scaled_for_none.before()
        self._expected[block] = _Expected(calls if scaled.requires_grad else None, bystanders, held_by_none)

    def _find_bystanders(self, block: OpenBlock) -> list[_Bystander]:
        """One gradient of each other optimizer that has yet to step with it."""
        found = []
        for other in optimizer_index.listed():
            leaves = other._amp_stash.leaves
            waits = other not in block.optimizers and self._record_of(other).had_gradients
            if not waits or block.overlaps(leaves) or is_in_block(other):
                continue
            param = next((param for param in leaves.masterless if param.grad is not None), None)
            if param is not None and param.grad is not None:
                found.append(_Bystander(other, param, param.grad, param.grad._version))
        return found

    def on_block_end(self, block: OpenBlock) -> None:
        """Note whose gradients ``block`` has given, and look at them if it has unscaled them."""
        expected = self._expected.pop(block, None)
        if expected is not None:
            self._look_at_bystanders(expected)
            self._scaled_for_none.after(block, expected.held_by_none)
        self._count_down()
        if block.has_new_grads is None:  # gradients are left to torch
            for optimizer in block.optimizers:
                self._note_gradients(optimizer)
            return
        if block.has_new_grads and expected is not None and expected.backward_calls == []:
            warn_of("unscaled loss in a block")
        for record in self._records.values():
            record.half_gradients.forget(block.leaves.masters)  # of others that share them
        for optimizer in block.optimizers:
            record = self._record_of(optimizer)
            record.had_block = True
            record.had_gradients = record.had_gradients or block.has_new_grads
            record.half_gradients.remember(optimizer._amp_stash.leaves.masters)

    def on_unscaled_by_script(self, optimizer: AmpOptimizer) -> None:
        """Note that a script has unscaled gradients of ``optimizer`` itself."""
        self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: AmpOptimizer) -> None:
        """Note that ``optimizer`` had a block since its last step, and got gradients."""
        record = self._record_of(optimizer)
        record.had_block = True
        record.had_gradients = True

    def on_block_undone(self, block: OpenBlock) -> None:
        """Note that ``block`` was left by an exception."""
        expected = self._expected.pop(block, None)
        if expected is not None:
            self._look_at_bystanders(expected)
        self._count_down()

    def _look_at_bystanders(self, expected: _Expected) -> None:
        """Note where a block has added to gradients of other optimizers."""
        for bystander in expected.bystanders:
            if bystander.is_there() and bystander.grad._version != bystander.version:
                seen = bystander._replace(version=bystander.grad._version)
                self._record_of(bystander.optimizer).foreign = seen

    def _count_down(self) -> None:
        """Count one block less to watch."""
        self.blocks_left = max(self.blocks_left - 1, 0)

    def end(self) -> None:
        """Take itself and its hooks away."""
        observer_state.observers[:] = [other for other in observer_state.observers if other is not self]
        self._hooks.close()
        for record in self._records.values():
            record.end_hook()

    def on_master_params(self, optimizer: AmpOptimizer) -> None:
        """Note that a script may write gradients of its own to the masters of ``optimizer``."""
        record = self._record_of(optimizer)
        if record.had_block or record.is_new(_gradients_in(optimizer)):
            return
        leaf = next((leaf for leaf in optimizer._amp_stash.leaves.tensors() if leaf.requires_grad), None)
        if leaf is not None:
            record.follow_backward(leaf)

    # -- a step --------------------------------------------------------------------------------------------------------
    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Look at the gradients that ``optimizer`` is about to step with."""
        stash: OptimizerState = optimizer._amp_stash
        record = self._record_of(optimizer)
        record.half_gradients.look()
        _look_at_foreign(record)
        is_scaled = bool(stash.leaves.masters) or not all(scaler.is_one for scaler in stash.session.scalers)
        gradients = _gradients_in(optimizer)
        if is_scaled and record.had_block and not record.had_gradients:
            warn_of("block without gradients")
        elif is_scaled and not record.had_block and not record.writes_own and record.is_new(gradients):
            warn_of("no block")
        record.end_hook()
        used = list(map(weakref.ref, gradients))
        self._records[optimizer] = _Record(used=used, half_gradients=record.half_gradients)
        if record.writes_own:  # a script may keep the list of masters
            self.on_master_params(optimizer)

    def on_step(self, optimizer: AmpOptimizer, skipped: bool | None) -> None:
        """End the watch with the first step after the last block."""
        if not self.blocks_left:
            self.end()

    def before_push(self, masters: Sequence[Master]) -> None:
        """Look whether a step has written to half weights."""
        if half_written(masters):
            warn_of("half weights written in a step")


def _gradients_in(optimizer: AmpOptimizer) -> list[torch.Tensor]:
    """The gradients in the model that belong to ``optimizer``."""
    return [leaf.grad for leaf in optimizer._amp_stash.leaves.tensors() if leaf.grad is not None]


def _look_at_foreign(record: _Record) -> None:
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
