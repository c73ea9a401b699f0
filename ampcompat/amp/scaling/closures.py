"""``step(closure)``, of optimizers that evaluate the loss themselves: LBFGS, SAM. apex refused closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.casts.contexts import Saved, restored
from ampcompat.amp.half.masters import sync_written
from ampcompat.amp.scaling.gradients import pending_in
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.steps import (
    announce_skip,
    finish,
    flags_of,
    make_ready,
    read,
    update_weights,
)


class _SkipStep(Exception):
    """Leaves the optimizer's own step from inside its closure: gradients overflowed."""


def evaluate(closure: Callable[[], Any], outside: Saved) -> Any:
    """Call ``closure`` with grad on and the casts of the code that called ``step``."""
    with torch.enable_grad(), restored(outside):
        return closure()


def step_with_closure(
    optimizer: Optimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved, **kwargs: Any
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller.

    When the first evaluation overflows, the step is skipped, and its loss returned. Where the optimizer has acted
    before (a later evaluation of LBFGS's search, that in the middle of SAM's step), it finds gradients of zero instead:
    it stops where it is, or goes back to where it was.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    evaluations = _Evaluations(optimizer, closure, outside)
    had_blocks = bool(stash.overflows or pending_in(stash.leaves))
    if had_blocks and not _evaluates_first(optimizer):
        if evaluations.have_overflowed():
            announce_skip(evaluations.overflowed)
            loss = evaluations.evaluate()
            evaluations.have_overflowed()  # notes what this evaluation has left; the step is skipped all the same
            finish(optimizer, stash, skipped=True)
            return loss
        evaluations.may_skip = False
    try:
        result = update_weights(optimizer, stash, original, evaluations.evaluate_or_skip, **kwargs)
    except _SkipStep:
        finish(optimizer, stash, skipped=True)
        return evaluations.first_loss
    finish(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    True of torch's optimizers and ours.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


class _Evaluations:
    """The evaluations of one ``step(closure)``.

    Attributes:
        first_loss: What the first one has returned.
        overflowed: The flags that the last check has found set.
        may_skip: Whether an overflow skips the step: the optimizer has not acted yet.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], outside: Saved) -> None:
        self._optimizer = optimizer
        self._stash: AmpOptimizerState = optimizer._amp_stash
        self._closure = closure
        self._outside = outside
        self.first_loss: Any = None
        self.overflowed: list[Any] = []
        self.may_skip = True

    def evaluate_or_skip(self) -> Any:
        """Evaluate the closure for the optimizer; after an overflow, leave the step, or give it gradients of zero."""
        loss = self.evaluate()
        if self.have_overflowed():
            if self.may_skip:
                announce_skip(self.overflowed)
                raise _SkipStep
            for gradient in self._stash.leaves.gradients():
                gradient.zero_()
        self.may_skip = False
        return loss

    def evaluate(self) -> Any:
        """Evaluate the closure once, on weights that follow the masters."""
        self._stash.look_up(self._optimizer)
        sync_written(self._stash.leaves.masters)
        loss = evaluate(self._closure, self._outside)
        if self.first_loss is None:
            self.first_loss = loss
        return loss

    def have_overflowed(self) -> bool:
        """Make the gradients ready for a step, and forget the flags; return whether one was set."""
        stash = self._stash
        make_ready(self._optimizer, stash)
        flags = flags_of(stash)
        self.overflowed = read(stash, flags) if flags else []
        stash.overflows = []
        stash.suspect = bool(self.overflowed)
        return bool(self.overflowed)
