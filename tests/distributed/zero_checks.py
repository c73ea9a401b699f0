"""``ZeroRedundancyOptimizer`` under DDP: what every rank runs (see ``checks``)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import LEVELS, MASTERS, Net, batch, equal_on_ranks, step
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp
from ampcompat.amp.masters import masters_of

ADAM = {"lr": 0.02, "weight_decay": 0.01, "eps": 1e-4}  # 1e-8 is zero in half, at O3


def sharded_adam(params: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.Adam, **ADAM, **options)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, **ADAM)


def made(level: str, optimizer_of: Any = sharded_adam, seed: int = 3, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    model = Net()
    model, optimizer = amp.initialize(
        model, optimizer_of(model.parameters()), opt_level=level, verbosity=0, **overrides
    )
    return model, optimizer, DistributedDataParallel(model)


def made_last(level: str) -> Any:
    """The optimizer is built around the wrapped model's parameters, and initialized last."""
    torch.manual_seed(3)
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    run = DistributedDataParallel(model)
    model, optimizer = amp.initialize(model, sharded_adam(run.parameters()), opt_level=level, verbosity=0)
    return model, optimizer, run


def loss(run: Any, at: int) -> float:
    with torch.no_grad():
        return float(run(batch(at, 0)).float().pow(2).mean())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def own_params(optimizer: Any) -> list[torch.Tensor]:
    """What this rank steps, as the model holds it."""
    return [p for group in optimizer._partition_parameters()[optimizer.rank] for p in group["params"]]


def exact(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The float32 weights of all ranks, on every rank."""
    saved = []
    for to in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to)
        found = {name: value.clone() for name, value in model.state_dict().items()}
        saved = found if to == dist.get_rank() else saved
    return saved


def trains_as_adam(level: str) -> None:
    """The same weights as Adam's under amp, to the bit, in either order of wrapping and initializing."""
    model, optimizer, run = made(level, adam)
    start = loss(run, 0)
    for at in range(20):
        step(run, optimizer, at)
    want, end = weights(model), loss(run, 0)
    assert end < 0.5 * start, (start, end)
    model, optimizer, run = made(level)
    for at in range(20):
        step(run, optimizer, at)
        equal_on_ranks(model.parameters())
    assert same(weights(model), want), (start, end, loss(run, 0))
    if level in MASTERS:  # its masters begin from half weights
        model, optimizer, run = made_last(level)
        for at in range(20):
            step(run, optimizer, at)
            equal_on_ranks(model.parameters())
        assert loss(run, 0) < 0.5 * start


CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (trains_as_adam, LEVELS),
]
