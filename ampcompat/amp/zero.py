"""Masters under ``torch.distributed.optim.ZeroRedundancyOptimizer``: sharded over the ranks, as its state is.

Its own groups go on holding the model's half weights, which it partitions and broadcasts. The optimizer inside, which
steps this rank's part, holds masters in their place. So a rank has masters, and float32 gradients, of what it steps and
no others; of the rest it unscales the half gradients in place, as it would without masters. Every rank sees all
gradients, so all of them find an overflow, skip the step and move the scale alike. apex had no support for it.

=========================================  =============================================================================
event                                      masters
=========================================  =============================================================================
step of the optimizer inside               written to the model's half weights, which are then broadcast
``consolidate_state_dict(to)``             rank ``to`` has those of all ranks, so that the model is saved to the bit
the next step                              those of other ranks are dropped
``initialize`` at another level            all ranks have all: they leave with the same weights
=========================================  =============================================================================
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.masters import drop_master, ensure_master, master_of, push
from ampcompat.amp.properties import HALF_DTYPES, Properties


def stepper(optimizer: Any) -> Any:
    """The optimizer whose params amp exchanges for masters: ``optimizer``, or the one inside that steps for it."""
    return vars(optimizer).get("optim", optimizer) if _torch.is_zero(optimizer) else optimizer


def check(optimizers: Iterable[Any], options: Properties) -> None:
    """Refuse a ZeroRedundancyOptimizer made in a way that cannot work.

    Raises:
        RuntimeError: It steps before gradients are unscaled, or keeps weights that are to be cast in its own buckets.
    """
    for optimizer in filter(_torch.is_zero, optimizers):
        if _torch.steps_in_backward(optimizer):
            raise RuntimeError(
                "amp.initialize got a ZeroRedundancyOptimizer with overlap_with_ddp=True - it steps inside the backward"
                " pass, before gradients are unscaled - make it with overlap_with_ddp=False."
            )
        if optimizer.parameters_as_bucket_view and options.cast_model_type in HALF_DTYPES:
            raise RuntimeError(
                f"amp.initialize got a ZeroRedundancyOptimizer with parameters_as_bucket_view=True at"
                f" opt_level={options.opt_level!r} - its buckets hold the float32 weights, which the level casts - make"
                " it with parameters_as_bucket_view=False, or use opt_level='O1' (O4 for bfloat16)."
            )


def attach(optimizer: Any) -> None:
    """Hook the optimizer inside, and saving and loading; the hooks stay, and do nothing without amp."""
    if not _torch.is_zero(optimizer) or "_amp_hooked" in vars(optimizer):
        return
    optimizer._amp_hooked = True
    optimizer.optim.register_step_post_hook(lambda *_: _stepped(optimizer))
    optimizer.register_load_state_dict_post_hook(_loaded)
    consolidate: Callable[..., None] = optimizer.consolidate_state_dict

    @functools.wraps(consolidate.__func__)  # type: ignore[attr-defined] # a bound method
    def consolidate_state_dict(_: Any, to: int = 0) -> None:
        gather(optimizer, to)
        consolidate(to)

    optimizer.consolidate_state_dict = types.MethodType(consolidate_state_dict, optimizer)


@torch.no_grad()
def gather(optimizer: Any, to: int | None = None) -> None:
    """Give rank ``to`` of the optimizer's group the masters of all ranks; to be called on every rank.

    Args:
        optimizer: Any; nothing happens to others than a ZeroRedundancyOptimizer with masters.
        to: The rank; None for every one.
    """
    stash = vars(optimizer).get("_amp_stash")
    if stash is None or not stash.session.policy.master_weights or not _torch.is_zero(optimizer):
        return
    stash.look_up(optimizer)
    homes = {
        id(param): (module, name)
        for model in state.models.live
        for module in model.modules()
        for name, param in module._parameters.items()
    }
    for rank, params in enumerate(_torch.params_by_rank(optimizer)):
        source = dist.get_global_rank(optimizer.process_group, rank)
        for half in params:
            master = master_of(half)
            if half.dtype not in HALF_DTYPES:
                continue
            if rank == optimizer.rank and master is not None:
                master.absorb()
                value = master.value.detach()
            else:
                value = torch.empty_like(half, dtype=torch.float32)
            dist.broadcast(value, source, group=optimizer.process_group)
            if rank != optimizer.rank and to in (None, optimizer.rank):
                master = ensure_master(*homes[id(half)]) if master is None else master
                master.value.copy_(value)
                master.settle()


def _stepped(optimizer: Any) -> None:
    """Write the masters that this rank has stepped to the model, before its weights are broadcast."""
    stash = vars(optimizer).get("_amp_stash")
    if stash is None or not stash.session.policy.master_weights:
        return
    push(stash.masters)
    for rank, params in enumerate(_torch.params_by_rank(optimizer)):
        for half in params if rank != optimizer.rank else ():
            master = master_of(half)
            if master is not None:  # of a gathered or loaded weight, which another rank now steps
                drop_master(master)


def _loaded(optimizer: Any) -> None:
    """Move state that was loaded for half weights to their masters."""
    stash = vars(optimizer).get("_amp_stash")
    inner = optimizer.optim.state
    for master in stash.masters if stash is not None else ():
        optimizer.state.pop(master.half, None)  # torch's second copy, in half
        if master.half in inner:
            inner[master.value] = inner.pop(master.half)
