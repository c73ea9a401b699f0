"""``optimizer.step(closure)``: what apex refused.

The first evaluation happens before the optimizer's own step: when it overflows, the whole step is skipped. A later one
(LBFGS) is repeated at the lower scale a few times; when that does not help, params and optimizer state go back to what
they were and the step is skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ampcompat.amp import overflow
from ampcompat.amp.backward_pass import finish_delayed
from ampcompat.amp.casts import Saved, casts_as
from ampcompat.amp.gradients import drop_half, heed_cleared
from ampcompat.amp.masters import push_all, reconcile
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

    @torch.enable_grad()
    def call() -> Any:
        with casts_as(outside):
            return closure()

    def evaluate() -> tuple[Any, bool]:
        reconcile(stash.parts(optimizer)[0])
        loss = call()
        finish_delayed(optimizer, stash)
        heed_cleared(stash.parts(optimizer)[0])
        skip, verdict = overflow.decide(optimizer, stash, on_host=True)
        vars(stash).update(verdict)
        return loss, skip

    def later() -> Any:
        for _ in range(1 + RETRIES):
            loss, overflowed = evaluate()
            if not overflowed:
                return loss
        raise _Abandon

    loss, overflowed = evaluate()
    snapshot = None
    if not overflowed and stash.session.dynamic and _evaluates_again(optimizer):
        snapshot = _snapshot(optimizer)
    pending, result, ended = [loss], loss, overflowed
    try:
        if not overflowed:
            try:
                result, ended = original(lambda: pending.pop() if pending else later(), **kwargs), True
            except _Abandon:
                _restore(optimizer, stash, snapshot)
                overflowed = ended = True
        _end(optimizer, stash, overflowed)
    except BaseException:
        if ended:
            _end(optimizer, stash, overflowed)
        else:
            _restore(optimizer, stash, snapshot)  # LBFGS cannot go on from the middle of its search
        raise
    notify("on_step", optimizer, stash.skipped)
    return result


def _end(optimizer: Any, stash: AmpOptimizerState, skipped: bool) -> None:
    """After the step, or instead of it; does no harm again."""
    masters, _ = stash.parts(optimizer)
    drop_half(masters)
    overflow.end_step(optimizer, stash, masters, skipped, {"skipped": skipped})


def _evaluates_again(optimizer: Any) -> bool:
    """Whether the optimizer may call its closure more than once; torch's and ours do not, LBFGS aside."""
    kind = type(optimizer)
    return not kind.__module__.startswith(("torch.optim.", "ampcompat.optimizers.")) or kind.__name__ == "LBFGS"


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
