"""``ZeroRedundancyOptimizer``: the parameters of every rank, and the optimizer inside, which steps this rank's."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_zero(optimizer: Any) -> bool:
    """Whether ``optimizer`` is one. Imports nothing: ``torch.distributed.optim`` takes its time."""
    home = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return home is not None and isinstance(optimizer, home.ZeroRedundancyOptimizer)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether DDP's communication hook steps it (``overlap_with_ddp=True``)."""
    return bool(optimizer._overlap_with_ddp)


def params_by_rank(optimizer: Any) -> list[list[torch.Tensor]]:
    """The model's parameters that each rank steps and broadcasts."""
    return [[p for group in groups for p in group["params"]] for groups in optimizer._partition_parameters()]


def separate_inner_groups(optimizer: Any) -> None:
    """Let the optimizer inside hold other tensors than those that are broadcast; torch gives both the same dicts."""
    groups = optimizer._partition_parameters()[optimizer.rank]
    groups[:] = [{**group, "params": list(group["params"])} for group in groups]
