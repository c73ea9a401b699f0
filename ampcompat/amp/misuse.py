"""Mistakes that leave no trace in plain torch: a watch over the first blocks of a run warns of each once.

Each is silent otherwise: a loss that was not scaled, a step with masters that no block gave gradients, half gradients
that a script has clipped, and an optimizer that ``initialize`` was not given.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.half.masters import Master
from ampcompat.amp.observers import observer_state
from ampcompat.amp.scaling.block import Block
from ampcompat.amp.scaling.groups import inner_optimizers
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, optimizer_index

#: How many blocks are watched for each loss: a hook on the loss takes a tenth of a millisecond of a backward pass.
WATCHED = 16

_FIX = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"
_MISTAKES = {
    "unscaled loss in a block": "A scale_loss block whose scaled loss got no backward() in it - gradients are divided"
    " by the loss scale at its exit, and were never multiplied by it - call backward() on what the block yields, not on"
    " the loss, and inside the block.",
    "no block": "optimizer.step() with gradients, but no scale_loss block of this optimizer since its last step -"
    f" master weights (O2, O5) have no gradient then and stay as they are - {_FIX}.",
    "half gradients edited": "Gradients of the model's half parameters changed after scale_loss (clipped, or a second"
    " backward() outside the block?) - the optimizer steps with the float32 gradients of the masters, which did not"
    " change - clip amp.master_params(optimizer) instead of model.parameters(), and give each loss a block of its own,"
    " or add the losses up.",
    "unknown optimizer": "{name}.step() with gradients that a scale_loss block has left multiplied by the loss scale -"
    " this optimizer was not given to amp.initialize, and a block unscales the gradients of its own optimizers - give"
    " it to amp.initialize with the others, and to the block: `with amp.scale_loss(loss, [optimizer_a, optimizer_b])`;"
    " or call its zero_grad() before the backward pass of its own loss.",
}

#: A gradient as it was left: the tensor, and its version.
_Left = tuple["weakref.ref[torch.Tensor]", int]


def _left(grad: torch.Tensor) -> _Left:
    return weakref.ref(grad), grad._version


def _is_as_left(left: _Left | None, grad: torch.Tensor) -> bool:
    return left is not None and left[0]() is grad and left[1] == grad._version


def warn_of(mistake: str, **parts: str) -> None:
    """Warn of ``mistake``, one of the above, the first time; ``parts`` are what its text leaves open."""
    warn_once(mistake, _MISTAKES[mistake].format(**parts))


def watch_more(losses: int) -> None:
    """Watch the next blocks, for ``losses`` losses of a call of ``initialize``."""
    watch = next((observer for observer in observer_state.observers if isinstance(observer, Watch)), None)
    if watch is None:
        watch = Watch()
        observer_state.observers.append(watch)
        state.undo_once(watch.end)
    watch.blocks_left += WATCHED * losses


class Watch:
    """Looks at blocks and steps, as an observer, and takes itself away at the first step after the last block.

    Attributes:
        blocks_left: How many blocks it has yet to see.
    """

    def __init__(self) -> None:
        self.blocks_left = 0
        self._passes: dict[Block, list[torch.Tensor]] = {}  # gradients of the scaled losses of open blocks
        self._had_block: weakref.WeakSet[AmpOptimizer] = weakref.WeakSet()  # since the last step
        self._halves: dict[Master, _Left] = {}  # half gradients as blocks have left them
        self._used: dict[Master, _Left] = {}  # as steps have found them
        self._scaled: dict[int, _Left] = {}  # gradients in tensors that no optimizer under amp steps
        self._hooks = ExitStack()
        _torch.call_before_steps(self._look_at_unknown, self._hooks)

    def on_scaled_loss(self, block: Block, scaled: torch.Tensor) -> None:
        """Follow the backward passes of a loss; look at what was edited before the block takes it."""
        for stash in block.stashes:
            self._look_at_halves(stash.leaves.masters)
        if scaled.requires_grad and not block.is_plain:
            passes = self._passes[block] = []
            scaled.register_hook(passes.append)  # type: ignore[no-untyped-call]

    def on_block_end(self, block: Block) -> None:
        """Warn where the loss was not scaled; note what the block has left."""
        self.blocks_left = max(self.blocks_left - 1, 0)
        passes = self._passes.pop(block, None)
        if block.has_gradients and passes is not None and not passes:
            warn_of("unscaled loss in a block")
        self._had_block.update(block.optimizers)
        for master in block.leaves.masters:
            if master.grad_shown and master.half.grad is not None:
                self._halves[master] = _left(master.half.grad)
        if block.scale is not None:
            held_by_none = {id(param): param.grad for param in _held_by_none() if param.grad is not None}
            self._scaled = {key: _left(grad) for key, grad in held_by_none.items()}

    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Warn of gradients that no block gave, or that were edited since."""
        masters = optimizer._amp_stash.leaves.masters
        self._look_at_halves(masters)
        with_gradients = [master for master in masters if master.half.grad is not None]
        if optimizer not in self._had_block and with_gradients:
            first = with_gradients[0]
            is_new = not _is_as_left(self._used.get(first), first.half.grad)  # type: ignore[arg-type]
            if is_new and first.value.grad is None:
                warn_of("no block")
        self._had_block.discard(optimizer)
        self._used = {master: _left(master.half.grad) for master in with_gradients}  # type: ignore[arg-type]

    def on_step(self, optimizer: AmpOptimizer, skipped: bool | None) -> None:
        """End the watch with the first step after the last block."""
        if not self.blocks_left:
            self.end()

    def end(self) -> None:
        """Take the watch away."""
        self._hooks.close()
        observer_state.observers[:] = [other for other in observer_state.observers if other is not self]

    def _look_at_halves(self, masters: list[Master]) -> None:
        """Warn where half gradients were written since their block, and forget them; zeroed ones are no edit."""
        for master in masters:
            left = self._halves.pop(master, None)
            grad = master.half.grad
            if left is not None and grad is not None and left[0]() is grad and left[1] != grad._version and grad.any():
                warn_of("half gradients edited")

    def _look_at_unknown(self, optimizer: Any) -> None:
        """Warn if ``optimizer``, which begins a step, uses a gradient that a block has left scaled."""
        if torch.compiler.is_compiling() or "_amp_stash" in vars(optimizer):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        uses_scaled = any(
            param.grad is not None and _is_as_left(self._scaled.get(id(param)), param.grad) for param in params
        )
        if uses_scaled and not any("_amp_stash" in vars(inner) for inner in inner_optimizers(optimizer)):
            warn_of("unknown optimizer", name=type(optimizer).__name__)


def _held_by_none() -> list[torch.Tensor]:
    """The parameters of models under amp that no optimizer under amp holds itself: half weights are among them."""
    held = {id(param) for each in optimizer_index.listed() for param in each._amp_stash.leaves.masterless}
    modules = dict.fromkeys(module for model in model_index.live for module in model.modules())
    params = [param for module in modules for param in module._parameters.values() if param is not None]
    return [param for param in params if id(param) not in held]
