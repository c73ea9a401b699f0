"""``ZeroRedundancyOptimizer`` under DDP: what every rank runs (see ``checks``)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import LEVELS, MASTERS, Net, backward, batch, equal_on_ranks, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp

WITH_FLOAT32_WEIGHTS = [level for level in LEVELS if level not in (*MASTERS, "O3")]
ADAM = {"lr": 0.02, "weight_decay": 0.01}


def sharded_adam(params: Any, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # torch 2.4 warns of something else in there

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


def loss(run: Any, at: int) -> float:
    with torch.no_grad():
        return float(run(batch(at, 0)).float().pow(2).mean())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def trains_as_adam(level: str) -> None:
    """The same weights as Adam's under amp, to the bit, in either order of wrapping and initializing."""
    model, optimizer, run = made(level, adam)
    start = loss(run, 0)
    for at in range(10):
        step(run, optimizer, at)
    want, end = weights(model), loss(run, 0)
    assert end < 0.7 * start, (start, end)
    model, optimizer, run = made(level)
    for at in range(10):
        step(run, optimizer, at)
        equal_on_ranks(model.parameters())
    assert same(weights(model), want), (start, end, loss(run, 0))


def overflow_on_one_rank_is_skipped_by_all(level: str) -> None:
    model, optimizer, run = made(level)
    step(run, optimizer, 0, factor=1e-3)
    before, held = weights(model), [p.detach().clone() for p in amp.master_params(optimizer)]
    for count in (1, 2):
        step(run, optimizer, 1, factor=float("inf") if dist.get_rank() == 1 else 1e-3)
        assert amp.step_was_skipped(optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0 ** (16 - count), "unskipped": 0}
        assert same(weights(model), before)
        assert same([p.detach() for p in amp.master_params(optimizer)], held)
    step(run, optimizer, 2, factor=1e-3)
    assert not amp.step_was_skipped(optimizer)
    assert not same(weights(model), before)
    equal_on_ranks(model.parameters())


def accumulates_under_no_sync(level: str) -> None:
    ends = []
    for optimizer_of in (adam, sharded_adam):
        model, optimizer, run = made(level, optimizer_of)
        for at in range(3):
            for block in range(3):
                with contextlib.nullcontext() if block else run.no_sync():
                    loss = run(batch(10 * block + at)).float().pow(2).mean()
                    backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    assert same(*ends)


def consolidates_and_resumes(level: str) -> None:
    """A run from rank 0's checkpoint is bitwise the uninterrupted run, whose exact weights plain Adam has too."""
    plain, optimizer, run = made(level, adam)
    for at in range(5):
        run = DistributedDataParallel(plain) if at == 3 else run  # as after resuming: see ``checks.resume``
        step(run, optimizer, at, factor=1e-3)
    want = plain.state_dict()
    model, optimizer, run = made(level)
    for at in range(3):
        step(run, optimizer, at, factor=1e-3)
    optimizer.consolidate_state_dict()
    buffer = io.BytesIO()
    if dist.get_rank() == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        assert len(parts["optimizer"]["state"]) == len(list(model.parameters()))
        torch.save(parts, buffer)
    sent = [buffer.getvalue()]
    dist.broadcast_object_list(sent, 0)
    run = DistributedDataParallel(model)
    for at in range(3, 5):
        step(run, optimizer, at, factor=1e-3)
    got = model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    for late in (False, True):
        saved = torch.load(io.BytesIO(sent[0]), weights_only=True)
        model, optimizer, run = made(level, seed=50 + dist.get_rank())
        if late:
            optimizer.load_state_dict(saved["optimizer"])
        run.module.load_state_dict(saved["model"])
        if not late:
            optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        for at in range(3, 5):
            step(run, optimizer, at, factor=1e-3)
        got = model.state_dict()
        assert all(torch.equal(got[name], value) for name, value in want.items()), late
        equal_on_ranks(model.parameters())


def takes_another_group(level: str) -> None:
    ends = []
    for optimizer_of in (adam, sharded_adam):
        torch.manual_seed(3)
        model = Net()
        optimizer = optimizer_of([*model.a.parameters(), *model.norm.parameters()])
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        run = DistributedDataParallel(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)
        for at in range(4):
            if at == 2:
                optimizer.zero_grad()
                optimizer.add_param_group({"params": list(model.b.parameters()), "initial_lr": 0.1, "lr": 0.1})
                schedule.base_lrs.append(0.1)
                schedule.lr_lambdas.append(lambda epoch: 0.9**epoch)
            step(run, optimizer, at)
            schedule.step()
        equal_on_ranks(model.parameters())
        ends.append(weights(model))
    assert same(*ends)


def steps_with_a_closure(level: str) -> None:
    ends = []
    for optimizer_of in (adam, sharded_adam):
        model, optimizer, run = made(level, optimizer_of)
        for at in range(4):

            def closure(at: int = at) -> torch.Tensor:
                optimizer.zero_grad()
                found: torch.Tensor = run(batch(at)).float().pow(2).mean()
                backward(found * (float("inf") if at == 2 else 1e-3), optimizer)
                return found

            assert optimizer.step(closure) is not None
            assert amp.step_was_skipped(optimizer) == (at == 2)
        equal_on_ranks(model.parameters())
        ends.append(weights(model))
    assert same(*ends)


def is_refused_where_it_cannot_work(level: str) -> None:
    told = [
        (
            {"overlap_with_ddp": True},
            "overlap_with_ddp=True - it steps inside the backward pass.*overlap_with_ddp=False",
        )
    ]
    if level != "O1":
        told.append(({}, "it broadcasts what it steps.*shard the model instead.*or use opt_level='O1'"))
    for option, words in told:
        model = Net()
        optimizer = sharded_adam(model.parameters(), **option)
        with pytest.raises(RuntimeError, match=words):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        amp.initialize(model, optimizer, enabled=False)


def weights_in_buckets(level: str) -> None:
    ends = []
    for options in ({}, {"parameters_as_bucket_view": True}):
        model, optimizer, run = made(level, lambda params, options=options: sharded_adam(params, **options))
        for at in range(3):
            step(run, optimizer, at)
        ends.append(weights(model))
    assert same(*ends)


CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (trains_as_adam, WITH_FLOAT32_WEIGHTS),
    (overflow_on_one_rank_is_skipped_by_all, ["O1"]),
    (accumulates_under_no_sync, ["O1"]),
    (consolidates_and_resumes, ["O1"]),
    (takes_another_group, ["O1"]),
    (steps_with_a_closure, ["O1"]),
    (is_refused_where_it_cannot_work, ["O1", "O2", "O3", "O5"]),
    (weights_in_buckets, ["O1"]),
]
