"""``step(closure)``, as LBFGS and SAM call it: the closure runs a block, and gradients may overflow in each evaluation.

apex refused closures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat.amp.casts.contexts import Saved, restored
from ampcompat.amp.half.masters import align_written
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, StepFlag
from ampcompat.amp.scaling.steps import announce_skip, finish, make_ready, read_flags, report_all, update_weights


class _SkipStep(Exception):
    """Leaves the optimizer's own step from inside its closure: gradients overflowed."""


def step_with_closure(
    optimizer: AmpOptimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller, on weights that follow the masters.

    When the first gradients that the optimizer would use overflow, the step is skipped, and the first loss returned.
    Where later ones do (in LBFGS's search, or in the middle of SAM's step), the optimizer finds gradients of zero
    instead: it stops where it is, or goes back to where it was.
    """
    stash: OptimizerState = optimizer._amp_stash
    evaluation = _Evaluation(optimizer, closure, outside)
    if not _evaluates_first(optimizer):
        overflowed = evaluation.take_earlier_overflows()
        if overflowed:
            announce_skip(overflowed)
            evaluation.run()
            make_ready(optimizer, stash)
            _take_set_flags(stash)  # of this evaluation; the step is skipped all the same
            finish(optimizer, stash, skipped=True)
            return evaluation.first_loss
    try:
        result = update_weights(optimizer, stash, original, evaluation.run_for_step)
    except _SkipStep:
        finish(optimizer, stash, skipped=True)
        return evaluation.first_loss
    finish(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: AmpOptimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    True of torch's optimizers and ours.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


class _Evaluation:
    """The evaluations of a closure in one step.

    Attributes:
        first_loss: What the first one has returned.
        has_acted: Whether the optimizer has been given gradients to use in this step, which can no longer be skipped.
    """

    def __init__(self, optimizer: AmpOptimizer, closure: Callable[[], Any], outside: Saved) -> None:
        self._optimizer = optimizer
        self._stash: OptimizerState = optimizer._amp_stash
        self._closure = closure
        self._outside = outside
        self.first_loss: Any = None
        self.has_acted = False

    def take_earlier_overflows(self) -> list[StepFlag]:
        """Take the flags of gradients that the optimizer begins with; return those that are set."""
        stash = self._stash
        make_ready(self._optimizer, stash)
        has_earlier = bool(stash.flags())
        overflowed = _take_set_flags(stash) if has_earlier else []
        self.has_acted = has_earlier and not overflowed
        return overflowed

    def run(self) -> Any:
        """Call the closure, with grad on and the casts of the code that called ``step``; return its loss.

        Weights follow the masters before.
        """
        follow_changes(self._optimizer)
        align_written(self._stash.leaves.masters)
        with torch.enable_grad(), restored(self._outside):
            loss = self._closure()
        if self.first_loss is None:
            self.first_loss = loss
        return loss

    def run_for_step(self) -> Any:
        """Call the closure for the optimizer, which uses the gradients; zero those that overflow once it has acted.

        Raises:
            _SkipStep: They have overflowed, and it has yet to act.
        """
        loss = self.run()
        make_ready(self._optimizer, self._stash)
        overflowed = _take_set_flags(self._stash)
        if overflowed and not self.has_acted:
            announce_skip(overflowed)
            raise _SkipStep
        if overflowed:
            for gradient in self._stash.leaves.gradients():
                gradient.zero_()
        self.has_acted = True
        return loss


def _take_set_flags(stash: OptimizerState) -> list[StepFlag]:
    """Report undecided steps, forget all flags, and return those that were set. Host syncs."""
    report_all(stash)
    flags = stash.flags()
    stash.forget_flags()
    return read_flags(flags) if flags else []
