"""``step(closure)``, of optimizers that evaluate the loss themselves: LBFGS, SAM. apex refused closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.casts.contexts import Saved, restored
from ampcompat.amp.half.masters import sync_written
from ampcompat.amp.scaling.gradient_sets import GradientState
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.steps import (
    announce_lost,
    announce_skip,
    finish,
    gradients_for_step,
    make_ready,
    overflows_of,
    read,
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
    for gradient_set in stash.sets:
        gradient_set.begin_anew([optimizer])
    had_blocks = any(each.state is not GradientState.NONE for each in stash.sets)
    steps_before = had_blocks and not _evaluates_first(optimizer)
    evaluations = _Evaluations(optimizer, closure, outside, may_skip=not steps_before)
    if steps_before and evaluations.overflowed():
        loss = evaluations.evaluate()
        evaluations.overflowed(skips=False)  # notes what this evaluation has left; the step is skipped all the same
        finish(optimizer, stash, skipped=True)
        return loss
    try:
        result = original(evaluations.evaluate_or_skip, **kwargs)
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
    """The evaluations of one ``step(closure)``; ``may_skip``: the optimizer has not used a gradient yet."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], outside: Saved, may_skip: bool) -> None:
        self._optimizer = optimizer
        self._stash: AmpOptimizerState = optimizer._amp_stash
        self._closure = closure
        self._outside = outside
        self._may_skip = may_skip
        self.first_loss: Any = None

    def evaluate_or_skip(self) -> Any:
        """Evaluate the closure for the optimizer; after an overflow, leave the step, or have it find zeros."""
        loss = self.evaluate()
        overflowed = self.overflowed(skips=self._may_skip)
        if overflowed and self._may_skip:
            raise _SkipStep
        if overflowed:
            for gradient in gradients_for_step(self._optimizer, self._stash):
                gradient.zero_()
        self._may_skip = False
        return loss

    def evaluate(self) -> Any:
        """Evaluate the closure once, on weights that follow the masters."""
        self._stash.look_up(self._optimizer)
        sync_written(self._stash.masters)
        loss = evaluate(self._closure, self._outside)
        if self.first_loss is None:
            self.first_loss = loss
        return loss

    def overflowed(self, skips: bool = True) -> bool:
        """Make the gradients ready for a step; whether they overflowed, or were lost. Say so if that ``skips`` it."""
        stash = self._stash
        is_lost = make_ready(stash)
        if is_lost and skips:
            announce_lost()
        overflows = overflows_of(self._optimizer, stash)
        overflowed = read(stash, overflows) if overflows else []
        if overflowed and skips:
            announce_skip(overflowed)
        is_unusable = is_lost or bool(overflowed)
        for gradient_set in stash.sets:
            gradient_set.note_checked(is_unusable)
        return is_unusable
