"""Mistakes that leave no trace in plain torch: a watch over the first blocks of a run warns of each once.

* A loss that is not scaled, or that has no backward pass in its block.
* At levels with masters: no block at all, or half gradients that a script has edited.
* An optimizer that amp does not know, and that steps with scaled gradients.
* A ``_prepare_amp_backward`` or ``_post_amp_backward`` that a script has replaced: blocks never call it.

Blocks and steps know nothing of the watch, which is an observer (``ampcompat.amp.observers``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp.half.masters import Master
from ampcompat.amp.observers import observer_state
from ampcompat.amp.scaling.backward_methods import are_replaced
from ampcompat.amp.scaling.block import Block
from ampcompat.amp.scaling.groups import inner_optimizers
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import entries_of

#: How many blocks are watched for each loss: a hook on the loss takes a tenth of a millisecond of a backward pass.
WATCHED = 16

_FIX = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"
_UNSCALED_LOSS = (
    "A scale_loss block whose scaled loss got no backward() in it - gradients are divided by the loss scale at its end,"
    " and only those of the scaled loss were multiplied by it - call backward() on what the block yields, not on the"
    " loss, and inside the block."
)
_NO_BLOCK = (
    "optimizer.step() with gradients, but no scale_loss block of this optimizer since its last step - master weights"
    f" (O2, O5) take gradients of blocks alone, and stay as they are - {_FIX}."
)
_EDITED = (
    "Gradients of the model's half parameters changed after scale_loss (clipped, assigned, or a second backward()"
    " outside the block?) - the optimizer steps with the float32 gradients of the masters, which did not change - clip"
    " or assign those of amp.master_params(optimizer) instead of model.parameters(), and give each loss a block of its"
    " own, or add the losses up."
)
_UNKNOWN_OPTIMIZER = (
    "{name}.step() with gradients that a scale_loss block has left multiplied by the loss scale - this optimizer was"
    " not given to amp.initialize, and a block unscales the gradients of its own optimizers - give it to amp.initialize"
    " with the others, and to the block: `with amp.scale_loss(loss, [optimizer_a, optimizer_b])`; or call its"
    " zero_grad() before the backward pass of its own loss."
)
_REPLACED_METHOD = (
    "optimizer._prepare_amp_backward or _post_amp_backward was replaced - scale_loss blocks unscale gradients"
    " themselves, and do not call it - change gradients after the block, those of amp.master_params(optimizer), or call"
    " it in a scale_loss of your own."
)


class _Gradient(NamedTuple):
    """A gradient as a block has left it."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, grad: torch.Tensor) -> _Gradient:
        """Note ``grad`` as it is now."""
        return cls(weakref.ref(grad), grad._version)

    def is_same_as(self, other: _Gradient | None) -> bool:
        """Whether both are one gradient at one version."""
        return other is not None and self.tensor() is other.tensor() and self.version == other.version

    def is_still(self, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is this gradient, unchanged."""
        return _torch.tensor_of(self.tensor) is grad and grad._version == self.version


def watch_more(losses: int) -> None:
    """Watch the next blocks, for the ``losses`` losses of a session."""
    watch = next((observer for observer in observer_state.observers if isinstance(observer, Watch)), None)
    if watch is None:
        watch = Watch()
        observer_state.observers.append(watch)
        state.undo_once(end_watch)
    watch.blocks_left += WATCHED * losses


def end_watch() -> None:
    """End the watch, if there is one."""
    for observer in list(observer_state.observers):
        if isinstance(observer, Watch):
            observer.end()


class Watch:
    """Looks at blocks and steps, and takes itself away at the first step after the last block.

    Attributes:
        blocks_left: How many blocks it has yet to see.
    """

    def __init__(self) -> None:
        self.blocks_left = 0
        # The gradients of the scaled loss of an open block: one for each backward pass.
        self._passes: weakref.WeakKeyDictionary[Block, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        # Optimizers that had a block since their last step.
        self._had_block: weakref.WeakSet[AmpOptimizer] = weakref.WeakSet()
        # Half gradients: as blocks have left them, and as the last step has found them.
        self._left: weakref.WeakKeyDictionary[Master, _Gradient] = weakref.WeakKeyDictionary()
        self._used: weakref.WeakKeyDictionary[Master, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()
        # Optimizers that have stepped, and that amp does not know; and gradients of their tensors, by the id of the
        # tensor: all gradients from before an open block, and the gradients that the last block has left scaled.
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[Block, dict[int, _Gradient]] = weakref.WeakKeyDictionary()
        self._scaled: dict[int, _Gradient] = {}
        self._hooks = ExitStack()
        _torch.call_before_steps(self._look_at_unknown_optimizer, self._hooks)
        state.undo.callback(self._hooks.close)

    def end(self) -> None:
        """Take the watch away, and its hooks."""
        self._hooks.close()
        observer_state.observers[:] = [other for other in observer_state.observers if other is not self]

    # -- blocks --------------------------------------------------------------------------------------------------------
    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: list[AmpOptimizer]) -> None:
        """Look at half gradients before the block takes them out of the model."""
        for optimizer in optimizers:
            self._look_at_half_gradients(optimizer._amp_stash.leaves.masters)
        if are_replaced(optimizers):
            warn_once("replaced backward method", _REPLACED_METHOD)

    def on_scaled_loss(self, block: Block, scaled: torch.Tensor) -> None:
        """Follow the backward passes of the scaled loss, and gradients that they give to unknown optimizers."""
        if scaled.requires_grad and not block.is_plain:
            passes = self._passes[block] = []
            scaled.register_hook(passes.append)  # type: ignore[no-untyped-call]
        if self._unknown:
            self._before[block] = self._gradients_of_unknown()

    def on_block_end(self, block: Block, has_failed: bool) -> None:
        """Warn where the loss got no backward pass; note what the block has left."""
        self.blocks_left = max(self.blocks_left - 1, 0)
        passes = self._passes.pop(block, None)
        got_none = passes is not None and not passes
        # At a scale of 1, a backward pass of the loss itself gives the same gradients.
        is_harmless = block.scale is None and block.has_gradients
        if got_none and not has_failed and not is_harmless:
            warn_once("unscaled loss in a block", _UNSCALED_LOSS)
        self._had_block.update(block.optimizers)
        for master in block.leaves.masters:
            if master.grad_shown and master.half.grad is not None:
                self._left[master] = _Gradient.of(master.half.grad)
        before = self._before.pop(block, {})
        if self._unknown and block.scale is not None:
            now = self._gradients_of_unknown()
            self._scaled = {key: gradient for key, gradient in now.items() if not gradient.is_same_as(before.get(key))}

    # -- steps ---------------------------------------------------------------------------------------------------------
    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Warn of half gradients that no block gave, or that were edited since."""
        masters = optimizer._amp_stash.leaves.masters
        self._look_at_half_gradients(masters)
        with_gradients = {master: master.half.grad for master in masters if master.half.grad is not None}
        if optimizer not in self._had_block and self._are_of_no_block(with_gradients):
            warn_once("no block", _NO_BLOCK)
        self._had_block.discard(optimizer)
        for master, grad in with_gradients.items():
            self._used[master] = weakref.ref(grad)

    def on_step(self, optimizer: AmpOptimizer, skipped: bool | None) -> None:
        """End the watch with the first step after the last block."""
        if not self.blocks_left:
            self.end()

    def _are_of_no_block(self, with_gradients: dict[Master, torch.Tensor]) -> bool:
        """Whether half gradients are new since the last step, and no master has one; the first stands for all."""
        if not with_gradients:
            return False
        master, grad = next(iter(with_gradients.items()))
        used = self._used.get(master)
        is_new = used is None or _torch.tensor_of(used) is not grad
        return is_new and master.value.grad is None

    def _look_at_half_gradients(self, masters: Iterable[Master]) -> None:
        """Warn where half gradients are others than their block has left, and forget them.

        Host syncs: only to tell a gradient that ``zero_grad(set_to_none=False)`` has zeroed from one that was edited.
        """
        for master in masters:
            left = self._left.pop(master, None)
            grad = master.half.grad
            if left is None or grad is None or left.is_still(grad):
                continue
            if not _is_zeroed(master):
                warn_once("half gradients edited", _EDITED)

    # -- optimizers that amp does not know -----------------------------------------------------------------------------
    def _look_at_unknown_optimizer(self, optimizer: Any) -> None:
        """Warn if ``optimizer``, which begins a step, uses a gradient that a block has left scaled.

        Its first step makes it known to blocks, so that the warning comes with a later one.
        """
        if torch.compiler.is_compiling() or "_amp_stash" in vars(optimizer):
            return
        if any("_amp_stash" in vars(inner) for inner in inner_optimizers(optimizer)):
            return
        self._unknown.add(optimizer)
        if any(self._is_still_scaled(param) for group in optimizer.param_groups for param in group["params"]):
            name = type(optimizer).__name__
            warn_once("unknown optimizer", _UNKNOWN_OPTIMIZER.format(name=name))

    def _is_still_scaled(self, param: torch.Tensor) -> bool:
        """Whether the gradient of ``param`` is as the last block has left it."""
        scaled = self._scaled.get(id(param))
        return scaled is not None and param.grad is not None and scaled.is_still(param.grad)

    def _gradients_of_unknown(self) -> dict[int, _Gradient]:
        """The gradients of tensors that unknown optimizers hold, and no other does."""
        stashes = [optimizer._amp_stash for optimizer in optimizer_index.listed()]
        known = {id(param) for stash in stashes for param in stash.leaves.masterless}
        known.update(id(master.value) for stash in stashes for master in stash.leaves.masters)
        gradients: dict[int, _Gradient] = {}
        for optimizer in self._unknown:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param.grad is not None and id(param) not in known:
                    gradients[id(param)] = _Gradient.of(param.grad)
        return gradients


def _is_zeroed(master: Master) -> bool:
    """Whether both gradients are zero, which is no edit."""
    grads = (master.half.grad, master.value.grad)
    return all(grad is None or not entries_of(grad).any() for grad in grads)
