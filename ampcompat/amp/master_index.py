"""Which tensor has which master: kept beside the tensors in their modules, found by either side."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp import module_moves
from ampcompat.amp.master_passes import reconcile
from ampcompat.amp.masters import Master, by_half, by_value


def master_of_value(tensor: torch.Tensor) -> Master | None:
    """The master whose float32 side is ``tensor``, if there is one."""
    master = by_value().get(id(tensor))
    return master if master is not None and master.value is tensor else None


def master_of_half(tensor: torch.Tensor) -> Master | None:
    """The master of the model tensor ``tensor``, if it has one."""
    master = by_half().get(id(tensor))
    return master if master is not None and master.half is tensor else None


def drop_all(module: torch.nn.Module) -> None:
    """``module``'s own tensors are float32 again and need no masters."""
    if module.__dict__.pop("_amp_masters", None):
        forget_lists()


def masters_in(module: torch.nn.Module) -> dict[str, Master]:
    """Masters of the tensors that ``module`` itself (not its children) holds, by name; created empty."""
    found: dict[str, Master] | None = module.__dict__.get("_amp_masters")
    if found is None:
        found = {}
        object.__setattr__(module, "_amp_masters", found)
    return found


def own_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and tensors of ``module``'s own parameters and buffers."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def masters_of(model: torch.nn.Module) -> list[Master]:
    """Every master in ``model``, each once; cached until a master is made or dropped anywhere."""
    cache: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[Master]]]
    cache = state.room("masters by model", weakref.WeakKeyDictionary)
    generation: int = state.room("masters generation", int)
    found = cache.get(model)
    if found is None or found[0] != generation:
        unique = {id(m): m for module in model.modules() for m in module.__dict__.get("_amp_masters", {}).values()}
        found = cache[model] = (generation, list(unique.values()))
    return found[1]


def forget_lists() -> None:
    """Make :func:`masters_of` look again."""
    state.rooms["masters generation"] = state.room("masters generation", int) + 1


def ensure_master(module: torch.nn.Module, name: str, value: torch.Tensor | None = None, adopt: bool = False) -> Master:
    """The master of ``module``'s half tensor ``name``, made if missing: of ``value``, else of the half."""
    held = masters_in(module)
    half: torch.Tensor | None = module._parameters.get(name)
    half = module._buffers[name] if half is None else half
    if half is None:
        raise RuntimeError(f"{type(module).__name__} has no tensor {name!r}.")
    if name not in held or held[name].half is not half:
        master = master_of_half(half)
        if master is None:
            master = Master(half, value, adopt)
        held[name] = master
        forget_lists()
    if not any(home() is module for home, _ in held[name].homes):
        held[name].homes.append((weakref.ref(module), name))
    return held[name]


def reconcile_model(model: torch.nn.Module) -> None:
    """Restore the invariant for every master in ``model``."""
    reconcile(masters_of(model))


def follow_replacements(masters: Iterable[Master]) -> None:
    """Notice parameters that were replaced in their module (``module.weight = nn.Parameter(...)``) and take them over.

    The optimizer goes on training the same master, which now holds the new values. Called where gradients are about
    to be used, never in a forward: ``functional_call`` replaces parameters there for a while.
    """
    # The rule, at thousands of masters twice a step: one look-up each, in a dict that the module keeps for life.
    for master in [m for m in masters if m.place[0].get(m.place[1]) is not m.half]:
        if not master.homes:
            continue
        home, name = master.homes[0]
        module = home()
        if module is None:
            continue
        master.place = module._parameters, name
        now = module._parameters.get(name, module._buffers.get(name))
        if now is not None and now is not master.half:
            _take_over(master, now, f"{name!r} of a {type(module).__name__}")


def _take_over(master: Master, now: torch.Tensor, where: str) -> None:
    if _torch.is_sharded(now):
        raise RuntimeError(
            f"Parameter {where} was sharded (fully_shard) after amp.initialize made its float32 master - masters are"
            " not sharded - use opt_level='O1', calling fully_shard before the optimizer and amp.initialize."
        )
    if now.shape != master.value.shape:
        warn_once(
            f"resized {where}",
            f"Parameter {where} was replaced by one of shape {tuple(now.shape)} after amp.initialize - the optimizer"
            f" holds the old one's master, of shape {tuple(master.value.shape)}, and does not train the new one - make"
            " a new optimizer and call amp.initialize again.",
        )
        return
    warn_once(
        f"replaced {where}",
        f"Parameter {where} was replaced after amp.initialize - the optimizer holds the master of the old one - the"
        " master takes the new values and goes on training them.",
    )
    grad, now.grad = now.grad, None
    other = master_of_half(now)  # made for the new one by a state_dict or a load in between
    with torch.no_grad():
        if other is not None:
            master.value.copy_(other.value)
        elif now.dtype == master.dtype:  # a copy of the old one on another device, perhaps: it has the low bits
            there = now.detach().to(master.value.device)
            master.value.copy_(torch.where(master.value.to(there.dtype) == there, master.value, there.float()))
        else:
            master.value.copy_(now)
        if now.dtype != master.dtype:
            now.data = now.data.to(master.dtype)
    now.grad = None if grad is None else grad.to(master.dtype)
    rebind(master, now)


def rebind(master: Master, now: torch.Tensor) -> None:
    """Make ``now`` the half side of ``master``, in every home of a tied weight; the master's value wins."""
    master.half, master.folded = now, None
    by_half()[id(now)] = master
    for home, name in master.homes:
        module = home()
        if module is None:
            continue
        masters_in(module)[name] = master
        if module._parameters.get(name) is not now and name in module._parameters:
            module._parameters[name] = now  # type: ignore[assignment] # tied weights stay tied
    forget_lists()
    if master.value.device != now.device:
        module_moves.follow_device(master)
    master.push()


def sync_masters(model: torch.nn.Module) -> int:
    """Take what the model's half weights hold into their float32 masters, comparing by value.

    Needed only after a write that moves no version counter: ``p.data.copy_()``, ``dist.broadcast(p.data)``,
    ``torch.nn.utils.vector_to_parameters``. Elements that nobody wrote keep their master's low bits.

    Args:
        model: A model given to ``amp.initialize``, or any module in one.

    Returns:
        How many tensors had been written. Reads the device.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"sync_masters got {type(model).__name__} - it takes a model - pass the module.")
    moved = 0
    for master in masters_of(model):
        if master.moved():
            master.reconcile()
            moved += 1
        else:
            moved += master.compare()
    return moved
