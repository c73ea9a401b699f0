"""Notice mistakes with a step: gradients of no block, writes to the model in the step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from ampcompat.amp.half.masters import Master, half_written
from ampcompat.amp.misuse.rule import LastSteps, Rule, gradients_in
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState


class WritesOfScript:
    """Whether gradients that come to one optimizer may be the script's own, until a backward pass reaches ``leaf``."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.may_come = True
        hooked = leaf.register_post_accumulate_grad_hook(self._note_backward)  # type: ignore[no-untyped-call]
        self._hook: RemovableHandle = hooked

    def _note_backward(self, _: torch.Tensor) -> None:
        self.may_come = False

    def end(self) -> None:
        """Take the hook away."""
        self._hook.remove()


class MissingBlock(Rule):
    """A step with gradients that no block gave, or after blocks that gave none.

    A script that asks for ``master_params`` before there are gradients may write its own there.
    """

    def __init__(self, steps: LastSteps) -> None:
        self._steps = steps
        self._writes: weakref.WeakKeyDictionary[AmpOptimizer, WritesOfScript] = weakref.WeakKeyDictionary()

    def on_master_params(self, optimizer: AmpOptimizer) -> None:
        """Note that a script may write gradients of its own to the masters of ``optimizer``."""
        since = self._steps.since(optimizer)
        if not since.had_block and not since.is_new(gradients_in(optimizer)):
            self._follow(optimizer)

    def _follow(self, optimizer: AmpOptimizer) -> None:
        """Take gradients for the script's own, until the next backward pass."""
        before = self._writes.pop(optimizer, None)
        if before is not None:
            before.end()
        leaf = next((leaf for leaf in optimizer._amp_stash.leaves.tensors() if leaf.requires_grad), None)
        if leaf is not None:
            self._writes[optimizer] = WritesOfScript(leaf)

    def before_step(self, optimizer: AmpOptimizer) -> None:
        """Look at the gradients that ``optimizer`` is about to step with."""
        stash: OptimizerState = optimizer._amp_stash
        since = self._steps.since(optimizer)
        writes = self._writes.get(optimizer)
        may_be_scripts = writes is not None and writes.may_come
        is_scaled = bool(stash.leaves.masters) or not all(scaler.is_one for scaler in stash.session.scalers)
        if is_scaled and since.had_block and not since.had_gradients:
            warn_of("block without gradients")
        elif is_scaled and not since.had_block and not may_be_scripts and since.is_new(gradients_in(optimizer)):
            warn_of("no block")
        if may_be_scripts:  # it may keep the list of masters
            self._follow(optimizer)
        elif writes is not None:
            self._writes.pop(optimizer).end()

    def end(self) -> None:
        """Take the hooks on leaves away."""
        for writes in self._writes.values():
            writes.end()


class WritesInStep(Rule):
    """A step that writes to half weights itself."""

    def before_push(self, masters: Sequence[Master]) -> None:
        """Look at half weights before their masters are written to them."""
        if half_written(masters):
            warn_of("half weights written in a step")
