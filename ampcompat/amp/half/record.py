"""The record that a module carries while its own parameters and buffers are half, and the masters in these records.

deepcopy and pickle take a record along with its module. The masters of a model are the masters of its modules
(:func:`masters_of`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat.amp.half.masters import Master, align_all, copies_lock, master_index, master_of
from ampcompat.amp.half.torch_events import watch_copies

#: Where the record is: ``module.__dict__[ATTRIBUTE]``.
ATTRIBUTE = "_amp_half_weights"


@dataclass(eq=False, slots=True)
class HalfWeights:
    """What amp keeps at a module whose own floating tensors it has cast to half.

    Attributes:
        dtype: The half dtype.
        has_masters: Whether its half tensors have float32 masters (O2, O5), or none (O3).
        masters: The masters that were made so far, by the name of their parameter or buffer.
        hooks: Handles of the hooks on saving and loading; empty until :func:`ampcompat.amp.half.saving.hook`.
    """

    dtype: torch.dtype
    has_masters: bool
    masters: dict[str, Master] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Take the attributes of the record whose copy this is: a deepcopy, or an unpickled one."""
        _, attributes = state
        for name, value in attributes.items():
            setattr(self, name, value)
        if self.masters:
            watch_copies()


# -- the record of a module --------------------------------------------------------------------------------------------
def record_of(module: torch.nn.Module) -> HalfWeights | None:
    """Return the record of ``module``; None where its own tensors are not half by amp."""
    return module.__dict__.get(ATTRIBUTE)


def note_half(module: torch.nn.Module, dtype: torch.dtype, has_masters: bool) -> None:
    """Record that ``module``'s own tensors are ``dtype``, and whether they have masters."""
    record = record_of(module)
    if record is None:
        module.__dict__[ATTRIBUTE] = HalfWeights(dtype, has_masters)
    else:
        record.dtype = dtype
        record.has_masters = has_masters


def own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the names and tensors of ``module``'s own parameters and buffers, except what ``fully_shard`` holds."""
    held = (*module._parameters.items(), *module._buffers.items())
    sharded: frozenset[str] = module.__dict__.get("_amp_sharded", frozenset())
    return [(name, tensor) for name, tensor in held if tensor is not None and name not in sharded]


# -- the masters of a module -------------------------------------------------------------------------------------------
def masters_by_name(module: torch.nn.Module) -> dict[str, Master]:
    """Return the masters of ``module``'s own tensors; an empty dict where there are none."""
    record = record_of(module)
    return {} if record is None else record.masters


def ensure_master(module: torch.nn.Module, name: str, value: torch.nn.Parameter | None = None) -> Master:
    """Return the master of the half tensor ``name`` of ``module``, which has a record; where there is none, make it.

    Args:
        module: A module that amp has cast to half.
        name: The name of one of its own parameters or buffers.
        value: For a new master, its float32 copy; a copy of the half tensor if None.
    """
    half: Any = module._parameters.get(name, module._buffers.get(name))
    record: HalfWeights = module.__dict__[ATTRIBUTE]
    master = record.masters.get(name)
    if master is None or master.half is not half:  # the script has put another tensor in the place of the first
        master = master_of(half) or Master(half, value)
        record.masters[name] = master
        master_index.generation += 1
    master.add_slot(module, name)
    return master


def drop_masters(module: torch.nn.Module) -> None:
    """Drop the masters of ``module``'s own tensors."""
    record = record_of(module)
    if record is not None:
        record.masters = {}
    master_index.generation += 1


# -- the masters of a model --------------------------------------------------------------------------------------------
def masters_of(model: torch.nn.Module) -> list[Master]:
    """Every master in ``model``, each once; cached until a master is made or dropped anywhere."""
    cached = master_index.by_model.get(model)
    if cached is not None and cached[0] == master_index.generation:
        return cached[1]
    masters = _masters_in(model)
    master_index.by_model[model] = (master_index.generation, masters)
    return masters


def _masters_in(model: torch.nn.Module) -> list[Master]:
    """Find the masters of ``model``'s modules as they are now, each once."""
    unique: dict[int, Master] = {}
    with copies_lock:
        for module in model.modules():
            for name, master in masters_by_name(module).items():
                unique[id(master)] = master
                master.add_slot(module, name)  # in a copied or unpickled model it has no slots yet
    return list(unique.values())


def sync_masters(model: torch.nn.Module) -> None:
    """Take what was written to the model's half weights into their float32 masters, or the other way round, now.

    Scripts need not call it: a step, a save and a forward do so. It also finds what nothing tells of, as a write to the
    model through a numpy array. Call it before a compiled forward, which does not check, if you wrote to masters since
    the last step. apex had no such call: its masters kept their own values, and a write to half weights was lost at the
    next step.

    Args:
        model: A model given to ``amp.initialize``, or any module in one.

    Host syncs: none.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"sync_masters got {type(model).__name__} - it takes a model - pass the module.")
    align_all(_masters_in(model))


def model_param(param: torch.Tensor) -> torch.Tensor:
    """Return the parameter of the model that an optimizer steps by ``param``, one of ``amp.master_params(optimizer)``.

    At O2 and O5 that is the half weight whose float32 master ``param`` is. Anything without a master is returned
    itself. apex had no such call: scripts walked two lists side by side.

    Args:
        param: A parameter that an optimizer holds.

    Raises:
        TypeError: ``param`` is not a tensor.
    """
    if not isinstance(param, torch.Tensor):
        raise TypeError(
            f"model_param got {type(param).__name__} - it takes one parameter - pass each of"
            " amp.master_params(optimizer)."
        )
    master = master_of(param)
    if master is None:
        return param
    return master.half


# -- parameters that a script has replaced -----------------------------------------------------------------------------
def check_replaced(masters: Iterable[Master]) -> None:
    """Warn, once, of each parameter that a module holds in the place of one with a master.

    Saves and look-ups of changed param groups ask. The master forgets where the replaced one was (``slots``).

    Raises:
        RuntimeError: ``fully_shard``, or a move to another kind of device, has put it there.
    """
    for master in masters:
        for tensors, name in master.slots:
            now = tensors.get(name)
            if not isinstance(now, torch.nn.Parameter) or now is master.half:
                continue
            if master_of(now) is None:  # one with a master is tied to a weight that is trained
                _refuse_or_warn(name, now, master)
                master.slots = []
                break


def _refuse_or_warn(name: str, now: torch.Tensor, master: Master) -> None:
    where = repr(name)
    device = master.half.device
    if _torch.is_sharded(now):
        raise RuntimeError(
            f"Parameter {where} was sharded (fully_shard) after amp.initialize made its float32 master - masters are"
            " not sharded, FSDP2's own shards are - call fully_shard before the optimizer is made and before"
            " amp.initialize."
        )
    if now.device.type != device.type:  # torch puts a new parameter there, where it cannot change the old one
        raise RuntimeError(
            f"The model moved from {device} to {now.device} after amp.initialize - its masters, which the optimizer"
            " holds, stayed - move the model before the optimizer is made and amp.initialize is called."
        )
    warn_once(
        f"replaced {id(master)}",
        f"Parameter {where} of shape {tuple(master.half.shape)} was replaced after amp.initialize - the optimizer"
        " holds the old one, and does not train the new one, as in plain PyTorch - copy new values into it"
        " (module.weight.data.copy_(...)), or give the new one to optimizer.add_param_group (D15).",
    )
