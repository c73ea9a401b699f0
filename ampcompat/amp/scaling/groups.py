"""Which tensors each optimizer under amp holds, and shares with others: looked up anew where groups have changed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Set

from ampcompat import _torch
from ampcompat.amp.scaling.exchange import match_state, put_masters_into
from ampcompat.amp.scaling.gradients import Leaves
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_index import optimizer_index
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session, call_state


@_torch.eager
def look_up(optimizer: AmpOptimizer) -> None:
    """Follow the groups of ``optimizer``, and its ``step``, where they have changed."""
    stash = optimizer._amp_stash
    if not _is_up_to_date(optimizer, stash):
        follow_groups()
    if vars(optimizer).get("step") is not stash.known_step:
        optimizer._amp_follow_step()


def _is_up_to_date(optimizer: AmpOptimizer, stash: OptimizerState) -> bool:
    """Whether the groups hold the very params that they held when they were last looked up."""
    if len(optimizer.param_groups) != len(stash.groups):
        return False
    for group, params in zip(optimizer.param_groups, stash.groups, strict=True):
        if len(group["params"]) != len(params):
            return False
        if not all(map(operator.is_, group["params"], params)):
            return False
    return True


def _look_up_anew(optimizer: AmpOptimizer) -> None:
    """Put masters of half params into the groups of ``optimizer``, and note what it holds."""
    stash = optimizer._amp_stash
    masters = put_masters_into(optimizer, stash.session)
    match_state(optimizer)
    sides = {id(tensor) for master in masters for tensor in (master.half, master.value)}
    held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    stash.leaves = Leaves(masters, [param for key, param in held.items() if key not in sides])
    stash.groups = [list(group["params"]) for group in optimizer.param_groups]
    note_when_gone(optimizer, stash.leaves.ids())


def note_when_gone(optimizer: AmpOptimizer, ids: set[int]) -> None:
    """Have the ``ids`` of its leaves noted when ``optimizer`` is collected: another may come in its place."""
    stash = optimizer._amp_stash
    if stash.when_gone is not None:
        stash.when_gone.detach()
    stash.when_gone = weakref.finalize(optimizer, _note_gone, optimizer_index.gone, ids)
    stash.when_gone.atexit = False


def follow_groups(unscaled: Set[int] = frozenset()) -> None:
    """Follow the groups of all optimizers under amp where they have changed: a tensor may have gone to another.

    A tensor that comes to an optimizer, and that none held, may have a gradient: blocks give gradients to every tensor
    of a loss, and unscale the ones of their own optimizers. Where losses were scaled, such a gradient is dropped.

    Args:
        unscaled: Ids of tensors that no block can have reached, in models that come under amp now.
    """
    optimizers = optimizer_index.listed()
    known = {key for optimizer in optimizers for key in optimizer._amp_stash.leaves.ids()}
    known.update(unscaled)
    known.update(optimizer_index.gone)
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        if _is_up_to_date(optimizer, stash):
            continue
        for master in stash.leaves.masters:  # one that leaves may come back, when a later block has given it another
            if master.grad_shown and master.half.grad is None:
                master.drop_gradient()
        _look_up_anew(optimizer)
        if stash.session.has_scaled:
            stash.checks_gradients = True  # an overflow may have left gradients of what it holds now
            _drop_gradients(stash.leaves.part(stash.leaves.ids() - known))
    _note_shared(optimizers)


def _drop_gradients(newcomers: Leaves) -> None:
    """Drop the gradients of ``newcomers``, with a warning if there are any."""
    for master in newcomers.masters:
        master.drop_gradient()
    for leaf in newcomers.tensors():
        if leaf.grad is not None:
            leaf.grad = None
            warn_of("scaled gradients of a later param")


def _note_gone(gone: set[int], ids: set[int]) -> None:
    """Add to ``gone`` the ``ids`` of the leaves of an optimizer that was collected: it shares them no more."""
    gone.update(ids)  # after a reset, this set is no longer ``optimizer_index.gone``
    _note_shared(optimizer_index.listed())


def _note_shared(optimizers: list[AmpOptimizer]) -> None:
    """Note which of ``optimizers`` hold a leaf that another one holds, too."""
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for key in optimizer._amp_stash.leaves.ids():
            holders[key] = holders.get(key, 0) + 1
    for optimizer in optimizers:
        optimizer._amp_stash.shared = {key for key in optimizer._amp_stash.leaves.ids() if holders[key] > 1}


# -- all calls of initialize -------------------------------------------------------------------------------------------
def calls_shown() -> list[Session]:
    """The calls of ``initialize`` whose optimizers are alive, the later first; the latest call if there are none.

    ``amp._amp_state.loss_scalers`` are the first one's. A call without optimizers (for an averaged model) has
    scalers that no loss uses.
    """
    calls = [optimizer._amp_stash.session for optimizer in reversed(optimizer_index.listed())]
    if not calls and call_state.latest is not None:
        calls = [call_state.latest]
    return list(dict.fromkeys(calls))


def scalers_shown() -> list[LossScaler]:
    """What ``amp._amp_state.loss_scalers`` is after a call of ``initialize``."""
    return calls_shown()[0].scalers
