"""``step(closure)``, of optimizers that evaluate the loss themselves: LBFGS, SAM. apex refused closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.casts.contexts import Saved, restored
from ampcompat.amp.half.masters import settle
from ampcompat.amp.scaling.gradient_sets import GradientState
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.passes import begin_anew
from ampcompat.amp.scaling.steps import finish, gradients_for_step, prepare


class _SkipStep(Exception):
    """Leaves the optimizer's own step from inside its closure: gradients overflowed."""


def evaluate(closure: Callable[[], Any], outside: Saved) -> Any:
    """Call ``closure`` with grad on and the casts of the code that called ``step``."""
    with torch.enable_grad(), restored(outside):
        return closure()


def step_with_closure(
    optimizer: Optimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved, **kwargs: Any
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller. apex refused closures.

    When the first evaluation overflows, the step is skipped, and its loss returned. Where the optimizer has acted
    before (a later evaluation of LBFGS's search, that in the middle of SAM's step), it finds gradients of zero instead:
    it stops where it is, or goes back to where it was.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    for gradient_set in stash.sets:
        begin_anew(gradient_set, [optimizer])
    has_gradients = any(each.state is not GradientState.NONE for each in stash.sets)
    acts_before = has_gradients and not _evaluates_first(optimizer)
    closure_step = _ClosureStep(optimizer, closure, outside, acts_before)
    if acts_before and closure_step.unscale_and_check():
        loss = closure_step.evaluate()
        closure_step.unscale_and_check()  # notes what this evaluation has left; the step is skipped all the same
        finish(optimizer, stash, skipped=True)
        return loss
    try:
        result = original(closure_step.evaluate_or_skip, **kwargs)
    except _SkipStep:
        finish(optimizer, stash, skipped=True)
        return closure_step.first_loss
    finish(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    torch's optimizers and ours do, and once, LBFGS aside.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


class _ClosureStep:
    """The evaluations of one ``step(closure)``."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any], outside: Saved, acts_before: bool) -> None:
        self._optimizer = optimizer
        self._stash: AmpOptimizerState = optimizer._amp_stash
        self._closure = closure
        self._outside = outside
        self._has_acted = acts_before
        self.first_loss: Any = None

    def evaluate_or_skip(self) -> Any:
        """Evaluate the closure for the optimizer; after an overflow, leave the step, or have it find zeros."""
        loss = self.evaluate()
        overflowed = self.unscale_and_check(is_skipped=not self._has_acted)
        if overflowed and not self._has_acted:
            raise _SkipStep
        if overflowed:
            for gradient in gradients_for_step(self._optimizer, self._stash):
                gradient.zero_()
        self._has_acted = True
        return loss

    def evaluate(self) -> Any:
        """Evaluate the closure once, on weights that follow the masters."""
        self._stash.look_up(self._optimizer)
        settle(self._stash.masters)
        loss = evaluate(self._closure, self._outside)
        if self.first_loss is None:
            self.first_loss = loss
        return loss

    def unscale_and_check(self, is_skipped: bool = True) -> bool:
        """Make the gradients that are there ready for a step; return whether they overflowed."""
        stash = self._stash
        overflowed = prepare(self._optimizer, stash, is_skipped=is_skipped)
        for gradient_set in stash.sets:
            gradient_set.note_checked(overflowed)
        return overflowed
