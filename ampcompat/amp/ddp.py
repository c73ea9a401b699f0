"""What ``DistributedDataParallel`` around an initialized model needs.

Its constructor broadcasts rank 0's weights: half ones at O2. Masters must become rank 0's as well, low bits included,
or ranks that started from different seeds drift apart. And under ``no_sync`` gradients stay on their rank until a later
backward pass averages what has accumulated in ``param.grad``: they must still be there, scaled, when it comes.
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
    """Hear of every DDP that is made from now on; the undo goes on ``state.undo``."""
    if state.models.ddp is None and dist.is_available():
        state.models.ddp = weakref.WeakSet()
        _torch.patch_ddp_constructor(_made, state.undo)


def _made(wrapper: Any, synchronised: bool) -> None:
    if state.models.ddp is not None:
        state.models.ddp.add(wrapper)
    if synchronised:
        broadcast_masters(wrapper.module, wrapper.process_group, set(wrapper.parameters_to_ignore))


def broadcast_masters(module: torch.nn.Module, group: Any, ignored: set[str]) -> None:
    """Give every rank rank 0's master of every half parameter in ``module``.

    All half parameters take part, whether this rank has made a master or not: ranks need not agree on that (rank 0
    alone saves checkpoints).
    """
    source = dist.get_global_rank(group, 0)
    for name, param in module.named_parameters():
        if param.dtype not in HALF_DTYPES or name in ignored:
            continue
        master = master_of(param)
        value = param.detach().float() if master is None else master.value.detach()
        dist.broadcast(value, source, group=group)
        if master is not None:
            master.push()


def holds_back(params: Iterable[torch.Tensor]) -> bool:
    """Whether a DDP in ``no_sync`` keeps the gradients of any of ``params`` on their rank."""
    silent = [wrapper for wrapper in state.models.ddp or () if not wrapper.require_backward_grad_sync]
    if not silent:
        return False
    held = {id(param) for param in params}
    return any(id(param) in held for wrapper in silent for param in wrapper.module.parameters())
