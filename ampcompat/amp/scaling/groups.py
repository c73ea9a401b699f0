"""Which tensors each optimizer under amp holds, and shares with others: looked up anew where groups have changed.

Where a half weight has a float32 master, the master stands in its place in the param groups.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.half.record import check_replaced, ensure_master, note_half, record_of
from ampcompat.amp.half.saving import hook
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index
from ampcompat.amp.scaling.session import Session

#: By the id of a parameter: the modules that hold it, and its name in each.
SlotsById = dict[int, list[tuple[torch.nn.Module, str]]]


@_torch.eager
def follow_changes(optimizer: AmpOptimizer) -> None:
    """Follow what a script has changed of ``optimizer`` since the last call: its groups and its ``step``.

    Where its groups have changed, so may have those of others: :func:`follow_groups` puts masters into them, and drops
    gradients that newcomers bring. A ``step`` that a script has put in the place of amp's is wrapped.
    """
    stash = optimizer._amp_stash
    if not _is_up_to_date(optimizer, stash):
        follow_groups()
    if vars(optimizer).get("step") is not stash.known_step:
        optimizer._amp_follow_step()


def _is_up_to_date(optimizer: AmpOptimizer, stash: OptimizerState) -> bool:
    """Whether the groups hold the very params that they held when they were last looked up."""
    groups = optimizer.param_groups
    if len(groups) != len(stash.groups):
        return False
    for group, known in zip(groups, stash.groups, strict=True):
        params = group["params"]
        if len(params) != len(known) or not all(map(operator.is_, params, known)):
            return False
    return True


def follow_groups(looks_at_all: bool = False) -> None:
    """Follow the groups of all optimizers under amp where they have changed: a tensor may have gone to another.

    Pass ``looks_at_all=True`` after ``initialize``: a group that has not changed may hold half weights now.

    Blocks give gradients to every tensor of a loss, and unscale those of their own optimizers. So what comes to an
    optimizer, and no other holds, comes without a gradient where losses are scaled.
    """
    optimizers = optimizer_index.listed()
    known = {key for optimizer in optimizers for key in optimizer._amp_stash.leaves.ids()}
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        if not looks_at_all and _is_up_to_date(optimizer, stash):
            continue
        groups = optimizer.param_groups
        stash.leaves = _take_in(optimizer, groups)
        stash.groups = [list(group["params"]) for group in groups]
        _drop_gradients_of_newcomers(stash, stash.leaves, known)
        check_replaced(stash.leaves.masters)
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for key in optimizer._amp_stash.leaves.ids():
            holders[key] = holders.get(key, 0) + 1
    for optimizer in optimizers:
        optimizer._amp_stash.shared = {key for key in optimizer._amp_stash.leaves.ids() if holders[key] > 1}


def follow_added_group(optimizer: AmpOptimizer) -> None:
    """Follow ``optimizer.add_param_group`` as :func:`follow_groups` does, without a look at its other groups."""
    stash = optimizer._amp_stash
    groups = optimizer.param_groups
    is_one_more = len(groups) == len(stash.groups) + 1
    held = stash.leaves.ids()
    was_held = any(id(model_tensor(param)) in held for param in groups[-1]["params"])
    if was_held or not is_one_more:  # a script has edited the others
        follow_changes(optimizer)
        return
    added = _take_in(optimizer, groups[-1:])
    stash.leaves.masters += added.masters
    stash.leaves.masterless += added.masterless
    stash.groups.append(list(groups[-1]["params"]))
    added_ids = added.ids()
    known: set[int] = set()
    for other in optimizer_index.listed():
        if other is optimizer:
            continue
        shared = added_ids & other._amp_stash.leaves.ids()
        if shared:
            other._amp_stash.shared |= shared
            known |= shared
    if known:
        stash.shared |= known
    _drop_gradients_of_newcomers(stash, added, known)


def _take_in(optimizer: AmpOptimizer, groups: list[dict[str, Any]]) -> Leaves:
    """Put masters of half params into ``groups`` of ``optimizer``; return what the model holds of them."""
    masters = put_masters_into(optimizer, groups, optimizer._amp_stash.session)
    match_state(optimizer, groups)
    sides = {id(tensor) for master in masters for tensor in (master.half, master.value)}
    held = {id(param): param for group in groups for param in group["params"]}
    return Leaves(masters, [param for key, param in held.items() if key not in sides])


def _drop_gradients_of_newcomers(stash: OptimizerState, leaves: Leaves, known: Set[int]) -> None:
    """Drop the gradients of ``leaves`` that no optimizer held before (``known``): they may be scaled."""
    if not stash.session.has_scaled:
        return
    for leaf in leaves.tensors():
        if id(leaf) not in known:
            leaf.grad = None


# -- masters in the place of half weights ------------------------------------------------------------------------------
def put_masters_into(optimizer: Optimizer, groups: list[dict[str, Any]], session: Session) -> list[Master]:
    """Put the masters of half weights into ``groups`` of ``optimizer``, as ``session`` wants it; return them.

    As in apex (``apex/amp/_process_optimizer.py: lazy_init_with_master_weights``).
    """
    masters: dict[Master, None] = {}
    slots_by_id = functools.cache(lambda: _slots_by_id(groups))  # most calls ask for none

    def exchanged(param: torch.Tensor) -> torch.Tensor:
        master = _master_to_step(param, session, slots_by_id)
        if master is None:
            return model_tensor(param)
        master.is_lent = True
        masters[master] = None
        return master.value

    _exchange_params(optimizer, groups, exchanged)
    return list(masters)


def give_back_params(optimizer: Optimizer) -> None:
    """Undo :func:`put_masters_into`: ``optimizer`` holds the model's own tensors again."""
    _exchange_params(optimizer, optimizer.param_groups, model_tensor)


def _exchange_params(
    optimizer: Optimizer, groups: list[dict[str, Any]], exchanged: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Put ``exchanged(param)`` in the place of each param in ``groups`` of ``optimizer``.

    Groups and their lists keep their identity; state moves with its parameter.
    """
    states = [each.state for each in (optimizer, *inner_optimizers(optimizer))]
    for group in groups:
        params = group["params"]
        for index, param in enumerate(params):
            new = exchanged(param)
            if new is param:
                continue
            for state_by_param in states:
                if param in state_by_param:
                    state_by_param[new] = state_by_param.pop(param)
            params[index] = new


def model_tensor(param: torch.Tensor) -> torch.Tensor:
    """The model's tensor that ``param`` is the master of; ``param`` itself if it is none."""
    master = master_of(param)
    if master is None or master.value is not param:
        return param
    return master.half


def _master_to_step(param: torch.Tensor, session: Session, slots_by_id: Callable[[], SlotsById]) -> Master | None:
    """The master that an optimizer of ``session`` steps for ``param``; None where it steps the model's own tensor.

    Where there is one, every optimizer steps it. It is made where the module that holds ``param`` has masters; a module
    that was added after ``initialize`` has them if the session wants it. A half parameter of no model has a master that
    only its optimizer's list keeps alive.
    """
    master = master_of(model_tensor(param))
    if master is not None:
        return master
    if param.dtype not in HALF_DTYPES:
        return None
    policy = session.policy
    slots = slots_by_id().get(id(param), [])
    for module, name in slots:
        was_added = record_of(module) is None
        if was_added and policy.half_dtype is not None:
            note_half(module, param.dtype, policy.master_weights)
            hook(module)
        record = record_of(module)
        if record is not None and record.has_masters:
            master = ensure_master(module, name)
    if master is None and not slots and policy.master_weights:
        master = Master(param)
    return master


def _slots_by_id(groups: list[dict[str, Any]]) -> SlotsById:
    """Where initialized models hold each parameter in ``groups``, by its id: in several modules where it is tied."""
    slots: SlotsById = {id(param): [] for group in groups for param in group["params"]}
    modules: list[torch.nn.Module | None] = list(model_index.live)
    seen = set(modules)
    for module in modules:  # the list grows while it is read
        if module is None:
            continue
        parts = module._modules
        if parts:
            new = [part for part in parts.values() if part not in seen]
            modules += new
            seen.update(new)
        params = module._parameters
        if slots.keys().isdisjoint(map(id, params.values())):
            continue
        for name, param in params.items():
            if id(param) in slots:
                slots[id(param)].append((module, name))
    return slots


def match_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give state from before ``initialize`` the dtype of its param, where torch's own ``load_state_dict`` does so."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        if not each.state or getattr(type(each), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
            continue
        for param in [param for group in groups for param in group["params"]]:
            held = each.state.get(param)
            if not isinstance(held, dict):
                continue
            for name, value in held.items():
                if name != "step" and _is_state_of(param, value) and value.dtype != param.dtype:
                    each.state[param] = {**each.state[param], name: value.to(param.dtype)}


def _is_state_of(param: torch.Tensor, value: object) -> bool:
    """Whether ``value`` is a momentum or the like: a floating tensor of the shape of ``param``."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape


def inner_optimizers(optimizer: object) -> list[Any]:
    """Every optimizer in the attributes of ``optimizer``, and in theirs: each once."""
    holders: list[object] = [optimizer]
    for holder in holders:  # the list grows while it is read
        for value in getattr(holder, "__dict__", {}).values():
            held: Iterable[object] = (value,)
            if isinstance(value, dict):
                held = value.values()
            elif isinstance(value, (list, tuple)):
                held = value
            for inner in held:
                if isinstance(inner, torch.optim.Optimizer) and not any(inner is known for known in holders):
                    holders.append(inner)
    return holders[1:]
