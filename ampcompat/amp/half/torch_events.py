"""What torch tells amp of while there are masters: writes that move no version, and steps of copied optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.masters import Master, master_index, master_of


def watch_writes() -> None:
    """Count writes to masters and their half weights through ``data`` and by collectives, until a reset."""
    state.patch_once(_torch.watch_parameter_data, _masters_by_tensor)
    state.patch_once(_torch.watch_collectives, _count_collective)


def _masters_by_tensor() -> weakref.WeakValueDictionary[int, Master]:
    return master_index.by_tensor


def watch_copies() -> None:
    """Look at the steps of optimizers that were copied or loaded together with a model, too, until a reset.

    The process may be one without ``initialize``.
    """
    watch_writes()
    state.patch_once(_torch.call_before_steps, _refuse_step_without_gradients)


# -- writes that move no version ---------------------------------------------------------------------------------------
def _count_collective(tensor: torch.Tensor) -> None:
    """Count the copies that ``tensor`` shares memory with, as an alias or a view does, as written."""
    memory = _torch.memory_of(tensor)
    if memory is None:
        return
    if master_index.by_memory is None:
        master_index.by_memory = _index_by_memory(master_index.by_tensor.values())
    for master in list(master_index.by_memory.get(memory, ())):
        for copy_of_weight in (master.half, master.value):
            if _torch.memory_of(copy_of_weight) == memory:
                master.count_as_written(copy_of_weight)


def _index_by_memory(masters: Iterable[Master]) -> dict[int, weakref.WeakSet[Master]]:
    """Masters by the memory of either copy; several, where a recurrent layer has all its weights in one memory."""
    found: dict[int, weakref.WeakSet[Master]] = {}
    for master in masters:
        for tensor in (master.half, master.value):
            memory = _torch.memory_of(tensor)
            if memory is not None:
                found.setdefault(memory, weakref.WeakSet()).add(master)
    return found


# -- steps of optimizers that were copied with a model -----------------------------------------------------------------
def _refuse_step_without_gradients(optimizer: Any) -> None:
    """Refuse the step of an ``optimizer`` that has masters, is not under amp, and so would train nothing."""
    if torch.compiler.is_compiling() or "_amp_stash" in vars(optimizer):
        return
    masters: set[Master] = set()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        master = master_of(param)
        if master is not None and master.value is param and not master.is_lent:
            masters.add(master)
    have_gradients = any(master.value.grad is not None for master in masters)
    if not have_gradients and any(master.half.grad is not None for master in masters):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() with masters that have no gradients - this optimizer was copied or"
            " loaded with its model, and is not under amp: it holds float32 masters, and the half weights of the model"
            " get the gradients - call amp.initialize(model, optimizer, opt_level=...) with both, at the level that"
            " they were at, and give each loss a scale_loss block."
        )
