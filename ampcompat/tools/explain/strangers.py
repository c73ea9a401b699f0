"""Optimizers that ``initialize`` was not given and that step with gradients of a scaled loss: no one unscales them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampcompat.tools.core import Optimizer
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.forwards import Block
from ampcompat.tools.explain.growth import name_of


class Strangers:
    """Optimizers that are not under amp, as they step."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._scaled: dict[int, int] = {}  # versions of gradients, by their ids, after a block whose loss was scaled
        self._found: weakref.ref[Optimizer] | None = None

    def start(self) -> Callable[[], None]:
        """Notice steps from now on; returns what ends that."""
        hook = register_optimizer_step_post_hook(self._after_step)
        return hook.remove

    def after_block(self, block: Block) -> None:
        """Note the gradients that a block has left to such optimizers."""
        grads = [grad for optimizer in self._seen for grad in _gradients_of(optimizer)]
        is_scaled = bool(grads) and block.scale != 1
        self._scaled = {id(grad): grad._version for grad in grads} if is_scaled else {}

    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if hasattr(optimizer, "_amp_stash"):
            return
        self._seen.add(optimizer)
        if any(self._scaled.get(id(grad)) == grad._version for grad in _gradients_of(optimizer)):
            self._found = weakref.ref(optimizer)

    def blame(self, fault: Fault) -> None:
        """Make such an optimizer, if there is one, the cause of ``fault``: no other cure helps while it steps so."""
        optimizer = None if self._found is None else self._found()
        if optimizer is None:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        weight = next(filter(None, map(name_of, params)), "weights")
        kind = type(optimizer).__name__
        fault.cause = f"{kind}, which amp.initialize was not given and which steps {weight}"
        fault.key = fault.cause
        fault.growth = None
        fault.hints = [
            f"give amp.initialize the {kind} that steps {weight}: its gradients are not divided by the scale"
        ]


def _gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    return [grad for grad in grads if grad is not None]
