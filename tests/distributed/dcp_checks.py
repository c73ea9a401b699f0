"""Checks of ``torch.distributed.checkpoint``; each function is one check, run on every rank."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from checks import LEVELS, MASTERS, SHARDS_ON_CPU, Net, backward, batch, step
from sharded_checks import mesh
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp


def adam(model: nn.Module) -> Any:
    """With two groups, one of them with other options, in another order than the model's parameters."""
    groups = [
        {"params": model.b.parameters(), "lr": 0.02},
        {"params": [*model.norm.parameters(), *model.a.parameters()]},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)  # the usual 1e-8 is zero in float16, at O3


def made(level: str, seed: int = 3, wrapped: bool = True) -> Any:
    torch.manual_seed(seed)
    model = Net()
    model, optimizer = amp.initialize(model, adam(model), opt_level=level, verbosity=0)
    return (DistributedDataParallel(model) if wrapped else model), optimizer


def folder() -> str:
    made_by_rank_0 = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made_by_rank_0)
    return made_by_rank_0[0]


def states(model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    got = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), got, strict=True))


def load(model: Any, optimizer: Any, saved: dict[str, Any], **options: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(**options),
    )


def trained(level: str, steps: int = 3) -> Any:
    run, optimizer = made(level)
    for at in range(steps):
        step(run, optimizer, at, factor=1 / 64)
    return run, optimizer


def moments(optimizer: Any) -> list[torch.Tensor]:
    """Adam's state, in the order of the groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p][name].float() for p in params for name in ("exp_avg", "exp_avg_sq", "step")]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def named_as_without_amp(level: str) -> None:
    """The names and shapes of plain torch, in float32 but for O3's state, of models with and without state."""
    for steps in (0, 2):
        got = states(*trained(level, steps))
        torch.manual_seed(3)
        plain = Net()
        plain_optimizer = adam(plain)
        for at in range(steps):
            plain(batch(at)).pow(2).mean().backward()
            plain_optimizer.step()
        want = states(plain, plain_optimizer)
        assert {name: value.shape for name, value in got["model"].items()} == {
            name: value.shape for name, value in want["model"].items()
        }
        assert got["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
        assert list(got["optimizer"]["state"]) == list(want["optimizer"]["state"])
        for name, held in got["optimizer"]["state"].items():
            assert held.keys() == want["optimizer"]["state"][name].keys()
            assert level == "O3" or {value.dtype for value in held.values()} == {torch.float32}


def asking_changes_nothing(level: str) -> None:
    """Before the first step, between backward and step, and after a step: the run goes on as if nobody had asked."""
    results = []
    for asks in (False, True):
        run, optimizer = made(level)
        for at in range(3):
            if asks:
                states(run, optimizer)
                if at == 0:  # torch has made Adam's state, with a first step counted, as it does without amp
                    optimizer.state.clear()
            optimizer.zero_grad()
            backward(run(batch(at)).float().pow(2).mean() / 64, optimizer)
            if asks and at:
                states(run, optimizer)
            optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert equal(*results)


def scales_of_latest_session() -> Any:
    """What ``amp.state_dict`` has of it: the runs that a check compares are calls of one process."""
    return {"loss_scaler0": amp.state_dict()["loss_scaler0"]}


def saved_by_two_and_loaded(level: str) -> None:
    """All ranks load it, one process alone, plain torch, and ranks that each get the whole state: to the bit."""
    import torch.distributed.checkpoint as dcp

    where = folder()
    run, optimizer = trained(level)
    writers = dist.new_group([0, 1])
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    # Before torch 2.7, load works in groups with rank 0 alone.
    alone = {"process_group": groups[dist.get_rank()]} if SHARDS_ON_CPU else {}
    if dist.get_rank() < 2:  # of four, when there are as many
        dcp.save({**states(run, optimizer), "amp": amp.state_dict()}, checkpoint_id=where, process_group=writers)
    dist.barrier()
    want = [p.detach().float().clone() for p in run.module.state_dict().values()]
    want_state, scale = moments(optimizer), amp.state_dict()

    def check(model: Any, other: Any, **options: Any) -> None:
        saved = {**states(model, other), "amp": scales_of_latest_session()}
        dcp.load(saved, checkpoint_id=where, **options)
        load(model, other, saved)
        inner = getattr(model, "module", model)
        assert equal([p.float() for p in inner.state_dict().values()], want)
        assert equal(moments(other), want_state)
        assert other.param_groups[0]["lr"] == 0.02
        assert saved["amp"] == scale

    check(*made(level, seed=7))
    check(*made(level, seed=8, wrapped=False), **alone)
    torch.manual_seed(9)
    plain = Net()
    check(plain, adam(plain), **alone)
    other, its_optimizer = made(level, seed=10)
    load(other, its_optimizer, states(run, optimizer, full_state_dict=True), full_state_dict=True)
    assert equal(moments(its_optimizer), want_state)
    resumed, resumed_optimizer = made(level, seed=11)
    saved = {**states(resumed, resumed_optimizer), "amp": scales_of_latest_session()}
    dcp.load(saved, checkpoint_id=where)
    load(resumed, resumed_optimizer, saved)
    again = DistributedDataParallel(run.module)  # both lay out their buckets anew
    for at in range(3, 6):
        step(resumed, resumed_optimizer, at)
        step(again, optimizer, at)
    assert equal(amp.master_params(resumed_optimizer), amp.master_params(optimizer))


def state_dicts_as_they_are(level: str) -> None:
    """``save({"model": model.state_dict(), ...})``, and ``load`` into the same: it writes into the masters."""
    import torch.distributed.checkpoint as dcp

    where = folder()
    run, optimizer = trained(level)
    dcp.save({"model": run.module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=where)
    want = [p.detach().float().clone() for p in amp.master_params(optimizer)]
    other, its_optimizer = trained(level, steps=1)
    with torch.no_grad():
        for p in amp.master_params(its_optimizer):
            p.add_(1.0)
    saved = {"model": other.module.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(saved, checkpoint_id=where)
    if level == "O3":  # copies
        other.module.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    assert equal([p.detach().float() for p in amp.master_params(its_optimizer)], want)
    assert equal(moments(its_optimizer), moments(optimizer))
    assert torch.equal(other(batch(0)), run(batch(0)))


def into_a_sharded_model(level: str) -> None:
    """What DDP has saved, into shards of the same level and back: the whole state, on every rank."""
    from torch.distributed.fsdp import fully_shard

    run, optimizer = trained(level)
    saved = states(run, optimizer, full_state_dict=True)
    torch.manual_seed(7)
    model = fully_shard(Net(), mesh=mesh())
    model, other = amp.initialize(model, adam(model), opt_level=level, verbosity=0)
    load(model, other, copy.deepcopy(saved), full_state_dict=True)  # torch puts shards into what it is given
    gathered = states(model, other, full_state_dict=True)
    for name, value in saved["model"].items():
        assert torch.equal(gathered["model"][name], value), name
    for name, held in saved["optimizer"]["state"].items():
        assert all(torch.equal(gathered["optimizer"]["state"][name][key], value) for key, value in held.items())
    back, its_optimizer = made(level, seed=8)
    load(back, its_optimizer, gathered, full_state_dict=True)
    assert equal(amp.master_params(its_optimizer), amp.master_params(optimizer))
    assert equal(moments(its_optimizer), moments(optimizer))


CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (named_as_without_amp, LEVELS),
    (asking_changes_nothing, LEVELS),
    (saved_by_two_and_loaded, LEVELS),
    (state_dicts_as_they_are, LEVELS),
    (into_a_sharded_model, MASTERS if SHARDS_ON_CPU else []),
]
