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

    Parameters without a master take part: rank 0 alone makes more of them when it saves checkpoints.
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
    held = {id(param) for param in params} if silent else ()
    return any(id(param) in held for wrapper in silent for param in wrapper.module.parameters())
