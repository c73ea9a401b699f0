"""Notice that an optimizer which amp does not know steps with gradients that a block has left scaled."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.misuse.rule import Rule
from ampcompat.amp.scaling.groups import inner_optimizers
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import OpenBlock
from ampcompat.amp.scaling.optimizer_state import optimizer_index

#: The gradient of each tensor, by the id of the tensor, and its version.
Gradients = dict[int, tuple[torch.Tensor, int]]


class _Scaled(NamedTuple):
    """A gradient that a block has left scaled.

    Attributes:
        grad: The gradient.
        version: Its version then.
        scale: What it is multiplied by.
    """

    grad: weakref.ref[torch.Tensor]
    version: int
    scale: torch.Tensor

    def is_as_it_was(self, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is this gradient, still scaled. Host sync, unless it is another gradient or version."""
        if _torch.tensor_of(self.grad) is not grad or grad._version != self.version:
            return False
        return self.scale.item() != 1


class ScaledForNone(Rule):
    """Gradients that blocks have given to models under amp, in tensors that no optimizer under amp steps.

    Blocks unscale the gradients of their optimizers: these stay multiplied by the loss scale. So do those of half
    weights, whose masters have the unscaled ones.
    """

    def __init__(self) -> None:
        self._scaled: dict[int, _Scaled] = {}  # by the id of the tensor; that of the gradient tells whether it is valid
        self._before: dict[OpenBlock, Gradients] = {}
        self._hooks = ExitStack()
        _torch.call_before_steps(self._look, self._hooks)
        state.undo.callback(self.end)

    def end(self) -> None:
        """Take the hook on steps away."""
        self._hooks.close()

    def on_scaled_loss(self, block: OpenBlock, scaled: torch.Tensor) -> None:
        """Remember the gradients of tensors that no optimizer under amp holds, before a backward pass."""
        self._before[block] = {
            id(param): (param.grad, param.grad._version) for param in _held_by_none() if param.grad is not None
        }

    def on_block_undone(self, block: OpenBlock) -> None:
        """Forget ``block``."""
        self._before.pop(block, None)

    def on_block_end(self, block: OpenBlock) -> None:
        """Note those that ``block`` has given since."""
        before = self._before.pop(block, None)
        if before is None or block.scale is None:
            return
        for param in _held_by_none():
            grad = param.grad
            known, version = before.get(id(param), (None, 0))
            if grad is not None and (grad is not known or grad._version != version):
                self._scaled[id(param)] = _Scaled(weakref.ref(grad), grad._version, block.scale)
        for master in block.leaves.masters:
            grad = master.half.grad
            if grad is not None:
                self._scaled[id(master.half)] = _Scaled(weakref.ref(grad), grad._version, block.scale)

    def _look(self, optimizer: Any) -> None:
        """Warn if ``optimizer``, which begins a step, uses one of them, and does not step by one that amp knows."""
        if torch.compiler.is_compiling() or not self._scaled or "_amp_stash" in vars(optimizer):
            return
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            scaled = self._scaled.get(id(param))
            if scaled is None or param.grad is None or not scaled.is_as_it_was(param.grad):
                continue
            steps_by_known = any("_amp_stash" in vars(inner) for inner in inner_optimizers(optimizer))
            if not steps_by_known:
                warn_of("unknown optimizer", name=type(optimizer).__name__)
            return


def _held_by_none() -> list[torch.Tensor]:
    """The trainable parameters of models under amp that no optimizer under amp holds."""
    held = {key for optimizer in optimizer_index.listed() for key in optimizer._amp_stash.leaves.ids()}
    modules: dict[torch.nn.Module, None] = {}
    for model in model_index.live:
        modules.update(dict.fromkeys(model.modules()))
    params = [param for module in modules for param in module._parameters.values() if param is not None]
    return [param for param in params if param.requires_grad and id(param) not in held]
