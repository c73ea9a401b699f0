"""``step(closure)``, of optimizers that evaluate the loss themselves: LBFGS, SAM. apex refused closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.casts.contexts import Saved, restored
from ampcompat.amp.half.masters import align_written
from ampcompat.amp.scaling.device_steps import StepFlag
from ampcompat.amp.scaling.optimizer_state import OptimizerState
from ampcompat.amp.scaling.steps import announce_skip, finish, flags_of, flags_set, make_ready, update_weights


class _SkipStep(Exception):
    """Leaves the optimizer's own step from inside its closure: gradients overflowed."""


def evaluate(closure: Callable[[], Any], outside: Saved) -> Any:
    """Call ``closure`` with grad on and the casts of the code that called ``step``."""
    with torch.enable_grad(), restored(outside):
        return closure()


def step_with_closure(
    optimizer: Optimizer, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller, on weights that follow the masters.

    When the first evaluation overflows, the step is skipped, and its loss returned. Where the optimizer has acted
    before (a later evaluation of LBFGS's search, that in the middle of SAM's step), it finds gradients of zero instead:
    it stops where it is, or goes back to where it was.
    """
    stash: OptimizerState = optimizer._amp_stash
    first_loss: Any = None
    has_acted = False

    def evaluated() -> Any:
        nonlocal first_loss
        stash.look_up(optimizer)
        align_written(stash.leaves.masters)
        loss = evaluate(closure, outside)
        if first_loss is None:
            first_loss = loss
        return loss

    def evaluated_for_step() -> Any:
        nonlocal has_acted
        loss = evaluated()
        make_ready(optimizer, stash)
        overflowed = _take_flags(stash)
        if overflowed and not has_acted:
            announce_skip(overflowed)
            raise _SkipStep
        if overflowed:
            for gradient in stash.leaves.gradients():
                gradient.zero_()
        has_acted = True
        return loss

    if not _evaluates_first(optimizer):  # it begins with gradients that blocks have given
        make_ready(optimizer, stash)
        has_acted = bool(stash.overflows or stash.uncounted)
    if has_acted:
        overflowed = _take_flags(stash)
        if overflowed:
            announce_skip(overflowed)
            evaluated()
            make_ready(optimizer, stash)
            _take_flags(stash)  # of this evaluation; the step is skipped all the same
            finish(optimizer, stash, skipped=True)
            return first_loss
    try:
        result = update_weights(optimizer, stash, original, evaluated_for_step)
    except _SkipStep:
        finish(optimizer, stash, skipped=True)
        return first_loss
    finish(optimizer, stash, skipped=False)
    return result


def _evaluates_first(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` calls the closure before it uses a gradient; SAM steps with those that it finds.

    True of torch's optimizers and ours.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


def _take_flags(stash: OptimizerState) -> list[StepFlag]:
    """Return the flags that are set, and forget all of them."""
    stash.device_steps.report_all()
    flags = flags_of(stash)
    overflowed = flags_set(flags) if flags else []
    stash.forget_overflows()
    stash.suspect = bool(overflowed)
    return overflowed
