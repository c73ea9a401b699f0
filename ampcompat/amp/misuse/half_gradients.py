"""Notice that half gradients were written after their block: the masters, which the optimizer steps, do not see it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ampcompat import _torch
from ampcompat.amp.half.masters import Master
from ampcompat.amp.misuse.rule import Rule
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import OpenBlock
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer
from ampcompat.amp.scaling.unscaling import entries_of


class EditedHalfGradients(Rule):
    """Half gradients that a script has written after their block."""

    def __init__(self) -> None:
        self._left: weakref.WeakKeyDictionary[AmpOptimizer, _LeftGradients] = weakref.WeakKeyDictionary()

    def _of(self, optimizer: AmpOptimizer) -> _LeftGradients:
        return self._left.setdefault(optimizer, _LeftGradients())

    def on_block(self, block: OpenBlock) -> None:
        """Look before the block takes them out of the model."""
        if not block.is_plain:
            for optimizer in block.optimizers:
                self._of(optimizer).look()

    def on_block_end(self, block: OpenBlock) -> None:
        """Remember what ``block`` has left, in the place of what earlier ones have."""
        if block.has_new_grads is None:  # gradients are left to torch
            return
        for left in self._left.values():
            left.forget(block.leaves.masters)  # of others that share them
        for optimizer in block.optimizers:
            self._of(optimizer).remember(optimizer._amp_stash.leaves.masters)

    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Look before the step drops the gradients of masters."""
        self._of(optimizer).look()


class _LeftGradients:
    """What blocks have left in the half gradients of one optimizer.

    Host syncs: only to tell a gradient that was zeroed from one that was edited.
    """

    def __init__(self) -> None:
        self._left: dict[Master, tuple[int, int]] = {}  # id and version of each gradient that is in its master's
        # The smallest of them, and a copy: ``param.grad.data.clamp_(-1, 1)``, of PyTorch's DQN tutorial, moves no
        # version.
        self._sample: tuple[Master, torch.Tensor] | None = None
        self._comparisons: list[_torch.HostCopy] = []  # of samples with their copies, on their way to the host

    def remember(self, masters: Sequence[Master]) -> None:
        """Remember what a block has left."""
        gradients = {master: grad for master in masters if master.grad_shown and (grad := master.half.grad) is not None}
        self._left = {master: (id(grad), grad._version) for master, grad in gradients.items()}
        dense = [master for master, grad in gradients.items() if not grad.is_sparse]
        if dense:
            smallest = min(dense, key=lambda master: master.half.numel())
            self._sample = (smallest, gradients[smallest].detach().clone())

    def forget(self, masters: Sequence[Master]) -> None:
        """Forget what is in the gradients of ``masters``: another block has added to them."""
        for master in masters:
            self._left.pop(master, None)
        if self._sample is not None and self._sample[0] not in self._left:
            self._sample = None

    def look(self) -> None:
        """Warn where they were written since, and forget them."""
        assigned: list[Master] = []
        edited: list[Master] = []
        for master, (key, version) in self._left.items():
            grad = master.half.grad
            if grad is None:
                continue
            if id(grad) != key:
                assigned.append(master)
            elif grad._version != version:
                edited.append(master)
        if self._sample is not None and not assigned and not edited:
            self._comparisons.append(_comparison(*self._sample))
        self._left = {}
        self._sample = None
        while self._comparisons and self._comparisons[0].arrived():
            was_edited = self._comparisons.pop(0).read()[0]
            if was_edited:
                warn_of("half gradients edited")
        if not all(map(_is_zeroed, assigned)):
            warn_of("half gradients assigned")
        if not all(map(_is_zeroed, edited)):
            warn_of("half gradients edited")


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
