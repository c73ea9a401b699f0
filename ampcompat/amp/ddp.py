"""Keep masters and gradients right under ``DistributedDataParallel``.

Its constructor broadcasts rank 0's weights: half ones at O2. Masters must become rank 0's as well, low bits included,
or ranks that started from different seeds drift apart. Under ``no_sync``, gradients must stay in ``param.grad``, still
scaled, until a later backward pass averages them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.masters import master_of
from ampcompat.amp.properties import HALF_DTYPES


def install() -> None:
    """Patch DDP's constructor to tell us of every wrapper made from now on."""
    if state.models.ddp is not None or not dist.is_available():
        return
    wrappers = state.models.ddp = weakref.WeakSet()

    def made(wrapper: Any, synchronised: bool) -> None:
        wrappers.add(wrapper)
        if synchronised:
            broadcast_masters(wrapper.module, wrapper.process_group, set(wrapper.parameters_to_ignore))

    _torch.patch_ddp_constructor(made, state.undo)


def broadcast_masters(module: torch.nn.Module, group: Any, ignored: set[str]) -> None:
    """Give every rank rank 0's master of every half parameter in ``module`` that has one there.

    Ranks need not have the same masters: rank 0 alone saves checkpoints, and ``ZeroRedundancyOptimizer`` shards them. A
    master that rank 0 lacks keeps its low bits where it rounds to rank 0's half weight, as after any write to that.
    One host sync, for which rank 0 has.
    """
    source = dist.get_global_rank(group, 0)
    halves = [p for name, p in module.named_parameters() if p.dtype in HALF_DTYPES and name not in ignored]
    if not halves:
        return
    masters = [master_of(param) for param in halves]
    on_rank_0 = torch.tensor([master is not None for master in masters], device=halves[0].device, dtype=torch.uint8)
    dist.broadcast(on_rank_0, source, group=group)
    for param, master, there in zip(halves, masters, on_rank_0.tolist(), strict=True):
        if there:
            value = torch.empty_like(param, dtype=torch.float32) if master is None else master.value.detach()
            _torch.broadcast_elements(value, source, group)
            if master is not None:
                master.push()
        elif master is not None:
            master.reconcile(compare=True)  # also what the constructor has written past the version counter


def holds_back(params: Iterable[torch.Tensor]) -> bool:
    """Whether a DDP in ``no_sync`` keeps the gradients of any of ``params`` on their rank."""
    silent = [wrapper for wrapper in state.models.ddp or () if not wrapper.require_backward_grad_sync]
    held = {id(param) for param in params} if silent else ()
    return any(id(param) in held for wrapper in silent for param in wrapper.module.parameters())
