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
    """Patch DDP's constructor: from now on every new wrapper is recorded, and broadcasts masters too."""
    if state.models.ddp is not None or not dist.is_available():
        return
    wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
    state.models.ddp = wrappers

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
    for param, master, has_master_on_rank_0 in zip(halves, masters, on_rank_0.tolist(), strict=True):
        if not has_master_on_rank_0:
            if master is not None:
                master.reconcile(compare=True)  # also what the constructor has written past the version counter
        elif master is None:  # every rank takes part in a broadcast
            _torch.broadcast_elements(torch.empty_like(param, dtype=torch.float32), source, group)
        else:
            _torch.broadcast_elements(master.value.detach(), source, group)
            master.push()


def holds_back(params: Iterable[torch.Tensor]) -> bool:
    """Whether a DDP in ``no_sync`` keeps the gradients of any of ``params`` on their rank."""
    in_no_sync = [wrapper for wrapper in state.models.ddp or () if not wrapper.require_backward_grad_sync]
    if not in_no_sync:
        return False
    ids = {id(param) for param in params}
    return any(id(param) in ids for wrapper in in_no_sync for param in wrapper.module.parameters())
