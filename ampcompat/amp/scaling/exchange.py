"""Which tensors an optimizer holds: the model's own, or the float32 masters of half weights in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.half.record import ensure_master, note_half, record_of
from ampcompat.amp.half.saving import hook
from ampcompat.amp.scaling.session import Session


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


def put_masters_into(optimizer: Optimizer, session: Session) -> list[Master]:
    """Put the masters of half weights into the groups of ``optimizer``, as ``session`` wants it; return them.

    As in apex (``apex/amp/_process_optimizer.py: lazy_init_with_master_weights``).
    """
    masters: dict[Master, None] = {}

    def exchanged(param: torch.Tensor) -> torch.Tensor:
        master = _master_to_step(param, session)
        if master is None:
            return model_tensor(param)
        master.is_lent = True
        masters[master] = None
        return master.value

    _exchange_params(optimizer, exchanged)
    return list(masters)


def give_back_params(optimizer: Optimizer) -> None:
    """Undo :func:`put_masters_into`: ``optimizer`` holds the model's own tensors again."""
    _exchange_params(optimizer, model_tensor)


def _exchange_params(optimizer: Optimizer, exchanged: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``exchanged(param)`` in the place of each param of ``optimizer``.

    Groups and their lists keep their identity; state moves with its parameter.
    """
    states = [each.state for each in (optimizer, *inner_optimizers(optimizer))]
    for group in optimizer.param_groups:
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


def _master_to_step(param: torch.Tensor, session: Session) -> Master | None:
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
    slots = _slots_of(param)
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


def _slots_of(param: torch.Tensor) -> list[tuple[torch.nn.Module, str]]:
    """The modules of initialized models that hold ``param`` (several where it is tied), and its name in each."""
    modules = dict.fromkeys(module for model in model_index.live for module in model.modules())
    return [(module, name) for module in modules for name, held in module._parameters.items() if held is param]


def match_state(optimizer: Optimizer) -> None:
    """Give state from before ``initialize`` the dtype of its param, where torch's own ``load_state_dict`` does so."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        if getattr(type(each), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
            continue
        for param, held in list(each.state.items()):
            if not isinstance(param, torch.Tensor) or not isinstance(held, dict):
                continue
            for name, value in held.items():
                if name != "step" and _is_state_of(param, value) and value.dtype != param.dtype:
                    each.state[param] = {**each.state[param], name: value.to(param.dtype)}


def _is_state_of(param: torch.Tensor, value: object) -> bool:
    """Whether ``value`` is a momentum or the like: a floating tensor of the shape of ``param``."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape
