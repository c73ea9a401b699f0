"""Data parallelism: ``DistributedDataParallel``, ``DataParallel`` and ``ZeroRedundancyOptimizer``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ampcompat._torch.patch import replace


def patch_ddp_constructor(after: Callable[[DistributedDataParallel, bool], None], undo: ExitStack) -> None:
    """Call ``after(ddp, whether it broadcast rank 0's weights)`` for every DDP that is made."""
    original: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        after(self, bool(kwargs.get("init_sync", True)))

    replace(DistributedDataParallel, "__init__", __init__, undo)


def patch_ddp_join(after: Callable[[DistributedDataParallel, int], None], undo: ExitStack) -> None:
    """Call ``after(ddp, rank)`` when ``join()`` ends, on every rank: ``rank`` of its group gave its weights to all."""
    original: Callable[..., None] = DistributedDataParallel._sync_final_model

    @functools.wraps(original)
    def _sync_final_model(self: Any, is_last_joiner: bool) -> None:
        original(self, is_last_joiner)
        after(self, self._authoritative_rank)

    replace(DistributedDataParallel, "_sync_final_model", _sync_final_model, undo)


def broadcast_elements(tensor: torch.Tensor, source: int, group: Any) -> None:
    """Broadcast ``tensor``, whose strides ranks need not share: ``dist.broadcast`` copies raw memory.

    Args:
        tensor: What ``source`` sends, and the other ranks overwrite.
        source: Global rank.
        group: Process group.
    """
    rows = tensor.contiguous()
    torch.distributed.broadcast(rows, source, group=group)
    if rows is not tensor:
        tensor.copy_(rows)


def parallel_wrapper(model: torch.nn.Module) -> str | None:
    """Name the data-parallel wrapper that ``model`` is, if it is one."""
    wrappers = (DistributedDataParallel, torch.nn.DataParallel)
    by_name = ("DistributedDataParallel", "FullyShardedDataParallel")  # apex's wrapper is not torch's
    if isinstance(model, wrappers) or type(model).__name__ in by_name:
        return type(model).__name__
    return None


def is_zero(optimizer: object) -> bool:
    """Whether ``optimizer`` is a ``ZeroRedundancyOptimizer``.

    Imports nothing: ``torch.distributed.optim`` takes its time.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether DDP's communication hook steps it (``overlap_with_ddp=True``)."""
    return bool(optimizer._overlap_with_ddp)
