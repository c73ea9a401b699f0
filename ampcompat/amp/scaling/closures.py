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
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState
from ampcompat.amp.scaling.steps import StepFlag, announce_skip, finish, flags_set, make_ready, report_all, update_weights


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
    losses: list[Any] = []
    has_acted = False  # whether the optimizer has been given gradients to use, so that the step cannot be skipped

    def run() -> Any:
        follow_changes(optimizer)
        align_written(stash.leaves.masters)
        with torch.enable_grad(), restored(outside):
            losses.append(closure())
        make_ready(optimizer, stash)
        return losses[-1]

    def run_for_step() -> Any:
        nonlocal has_acted
        loss = run()
        overflowed = _take_flags(stash)
        if overflowed and not has_acted:
            announce_skip(overflowed)
            raise _SkipStep
        if overflowed:
            for gradient in stash.leaves.gradients():
                gradient.zero_()
        has_acted = True
        return loss

    overflowed: list[StepFlag] = []
    has_earlier = False
    if not _evaluates_first(optimizer):  # it may begin with gradients that are there
        make_ready(optimizer, stash)
        has_earlier = bool(stash.overflows)
        overflowed = _take_flags(stash) if has_earlier else []
    has_acted = has_earlier
    try:
        if overflowed:
            announce_skip(overflowed)
            run()
            raise _SkipStep
        result = update_weights(optimizer, stash, original, run_for_step)
    except _SkipStep:
        finish(optimizer, stash, skipped=True)
        return losses[0]
    finish(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: AmpOptimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    True of torch's optimizers and ours.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


def _take_flags(stash: OptimizerState) -> list[StepFlag]:
    """Return the flags that are set, and forget all of them."""
    report_all(stash)
    flags = stash.overflows
    stash.overflows = []
    return flags_set(flags) if flags else []
