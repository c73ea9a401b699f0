"""``optimizer.step(closure)``: what apex refused.

When the first evaluation overflows, the whole step is skipped. For torch's optimizers, which begin with it, it happens
before their own step; others may do something before (SAM) and are put back to where they were. A later one (LBFGS) is
repeated at the lower scale a few times; when that does not help, params and optimizer state go back and the step is
skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ampcompat.amp import misuse, overflow
from ampcompat.amp.backward_pass import finish_delayed
from ampcompat.amp.casts import Saved, casts_as
from ampcompat.amp.gradients import drop_half, heed_cleared, take_unscaled
from ampcompat.amp.master_passes import push_all, reconcile
from ampcompat.amp.observers import notify
from ampcompat.amp.optimizer_state import AmpOptimizerState

#: Repetitions of a later evaluation that overflows; each halves the scale.
RETRIES = 4


class _Abandon(Exception):
    """Leaves the optimizer's own step from inside its closure."""


def step_with_closure(
    optimizer: Any, original: Callable[..., Any], closure: Callable[[], Any], outside: Saved, **kwargs: Any
) -> Any:
    """Step with ``closure``, which runs with grad on and the casts of the caller.

    Returns:
        What the optimizer's step returns; the loss of the first evaluation if the step was skipped.
    """
    stash = optimizer._amp_stash
    losses: list[Any] = []

    @torch.enable_grad()
    def call() -> Any:
        with casts_as(outside):
            return closure()

    def overflowed() -> bool:
        masters, direct = stash.parts(optimizer)
        finish_delayed(optimizer, stash)
        misuse.warn_at_step(stash, masters, direct, heed_cleared(masters))
        if not stash.blocks:
            take_unscaled(masters)
        skip, verdict = overflow.decide(optimizer, stash, on_host=True)
        vars(stash).update(verdict)
        return skip

    def evaluate() -> bool:
        reconcile(stash.parts(optimizer)[0])
        losses.append(call())
        return overflowed()

    def asked() -> Any:
        if pending:
            return pending.pop()
        for attempt in range(1 + RETRIES if losses else 1):
            if attempt:
                optimizer.zero_grad()  # for a closure that leaves this to its optimizer
            if not evaluate():
                return losses[-1]
        raise _Abandon

    if _asks_first(optimizer):
        skip = evaluate()
    else:  # SAM steps with the gradients that it finds, and asks in the middle
        skip = bool(stash.blocks or stash.waiting) and overflowed()
        if skip:
            evaluate()  # for the loss to return
    snapshot = None
    if not skip and stash.session.dynamic and _evaluates_again(optimizer):
        snapshot = _snapshot(optimizer)
    pending, ended = losses[:], skip
    try:
        if not skip:
            try:
                result, ended = original(asked, **kwargs), True
            except _Abandon:
                _restore(optimizer, stash, snapshot)
                skip = ended = True
        _end(optimizer, stash, skip)
    except BaseException:
        if ended:
            _end(optimizer, stash, skip)
        else:
            _restore(optimizer, stash, snapshot)  # LBFGS cannot go on from the middle of its search
        raise
    notify("on_step", optimizer, stash.skipped)
    return losses[0] if skip else result


def _end(optimizer: Any, stash: AmpOptimizerState, skipped: bool) -> None:
    """After the step, or instead of it; does no harm again."""
    masters, _ = stash.parts(optimizer)
    drop_half(masters)
    overflow.end_step(optimizer, stash, masters, skipped, {"skipped": skipped})


def _asks_first(optimizer: Any) -> bool:
    """Whether the optimizer calls its closure before it does anything: torch's and ours do."""
    return type(optimizer).__module__.startswith(("torch.optim.", "ampcompat.optimizers."))


def _evaluates_again(optimizer: Any) -> bool:
    """Whether the optimizer may call its closure more than once, or too late; torch's and ours do not, LBFGS aside."""
    return not _asks_first(optimizer) or type(optimizer).__name__ == "LBFGS"


def _snapshot(optimizer: Any) -> Any:
    params = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    state = {p: copy.deepcopy(dict(values)) for p, values in optimizer.state.items()}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return params, state, groups


@torch.no_grad()
def _restore(optimizer: Any, stash: AmpOptimizerState, snapshot: Any) -> None:
    if snapshot is None:
        return
    params, state, groups = snapshot
    for param, value in params:
        param.copy_(value)
    optimizer.state.clear()
    for param, values in state.items():
        optimizer.state[param] = values
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)  # some optimizers count steps here
    push_all(stash.parts(optimizer)[0])
