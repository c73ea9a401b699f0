"""Checks of ``fully_shard`` at levels that cast weights; each function is one check, run on every rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import checks
import pytest
import torch
import torch.distributed as dist
from checks import MAKES_SHARDS_ON_CPU, MASTERS, SHARDS_ON_CPU, backward, batch
from internals import is_under_amp
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampcompat import _torch, amp, optimizers
from ampcompat._torch import TORCH, is_fully_sharded, local_part

#: Steps of a run that is compared; 200 in the slow launches.
STEPS = int(os.environ.get("TEST_STEPS", "20"))
HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
INF = float("inf")
#: Before torch 2.9, ``reduce_scatter`` of gloo returns the sum where ``fully_shard`` asks for the mean.
ADDS_GRADIENTS_UP = Version("2.9") > TORCH


class Net(nn.Module):
    """Three units of ``fully_shard``: the first layer, the norm, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 2)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) + self.shift
        return self.last(hidden.relu())


def mesh() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: Any, **options: Any) -> Any:
    """Shard ``model`` as a script does: what stays float32 by itself, parts before the whole."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            fully_shard(module, mesh=mesh(), **options)
    if hasattr(model, "first"):
        fully_shard(model.first, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def made(level: str, seed: int = 3, optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = shard(Net())
    return amp.initialize(model, optimizer(model.parameters(), lr=1e-2), opt_level=level, verbosity=0, **options)


def step(model: Any, optimizer: Any, at: int, factor: float = 1.0, clip: float = 1.0) -> float:
    """One step by the mean of the gradients of all ranks; returns the loss."""
    optimizer.zero_grad()
    if ADDS_GRADIENTS_UP and is_fully_sharded(model):
        factor /= dist.get_world_size()
    loss = model(batch(at)).float().pow(2).mean()
    backward(loss * factor / 64, optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
    optimizer.step()
    return loss.item()


def overflow_at(at: int) -> float:
    """Every eleventh step, one rank's loss overflows; another rank's the next time."""
    if at % 11 != 5:
        return 1.0
    return INF if dist.get_rank() == at % dist.get_world_size() else 1.0


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, gathered from all ranks."""
    state = model.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in state.items()
    }


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What is the same on all ranks: no statistics of batch norm, which each rank keeps of its own inputs."""
    return {name: value for name, value in whole(model).items() if not name.startswith(("norm.run", "norm.num"))}


def equal_on_ranks(model: Any) -> None:
    """Every rank gathers the same weights, and has the same scale."""
    params = trained(model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (params, amp.state_dict()))
    for theirs, scale in everyone:
        assert scale == everyone[0][1]
        assert all(torch.equal(params[name], value) for name, value in theirs.items())


def trains_as_in_plain_torch(level: str) -> None:
    """At levels without half weights: same skips, same weights."""
    from torch.distributed.fsdp import fully_shard

    def sharded_net() -> Any:
        torch.manual_seed(3)
        model = fully_shard(checks.Net(), mesh=mesh())
        return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def shards(model: Any) -> list[torch.Tensor]:
        return [p.to_local().detach().clone() for p in model.parameters()]

    model, optimizer = sharded_net()
    plain, plain_optimizer = sharded_net()
    start = shards(plain)
    for at in (0, 1, 3, 4):  # the second step is skipped below
        plain_optimizer.zero_grad()
        plain(batch(at)).pow(2).mean().div(64).backward()  # times 2^16 it must fit into float16
        plain_optimizer.step()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for at in range(5):
        if at == 2 and level != "O1":
            continue
        optimizer.zero_grad()
        factor = INF if at == 2 and dist.get_rank() == 1 else 1.0
        backward(model(batch(at)).float().pow(2).mean().div(64) * factor, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (at == 2), (at, amp.state_dict())
    # Products in half are off by 2^-11 (float16) or 2^-8 (bfloat16) each; four steps add up.
    loose = {"O0": 0.0, "O1": 2.0**-8, "O4": 2.0**-4}[level]
    for got, want, first in zip(shards(model), shards(plain), start, strict=True):
        if want.numel():
            moved = (want - first).abs().max().item()
            assert moved > 1e-3
            torch.testing.assert_close(got, want, rtol=0.0, atol=loose * moved)
    equal_on_ranks(model)


def after_initialize(level: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model, _optimizer, _ = checks.made(level, wrap=lambda model: model)
    with pytest.raises(RuntimeError, match="was sharded .fully_shard. after amp.initialize"):
        fully_shard(model, mesh=mesh())


def trains_as_under_ddp(level: str) -> None:
    """The losses of DDP at the same level, but for what half rounds off; overflows on one rank skip on all."""
    losses = {}
    for kind in ("sharded", "ddp", "ddp at O0"):
        torch.manual_seed(3)
        model: Any = Net()
        if kind == "sharded":
            shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: Any = {"opt_level": level, "loss_scale": "dynamic"}  # also at O3 and O5, for the overflows
        if kind == "ddp at O0":
            options["opt_level"] = "O0"
        elif kind == "ddp" and level == "O3":  # shards are masters, which O3 has not under DDP
            options |= {"opt_level": "O2", "keep_batchnorm_fp32": False}
        model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
        run = model if kind == "sharded" else DistributedDataParallel(model)
        losses[kind] = []
        skipped = []
        for at in range(STEPS):
            losses[kind].append(step(run, optimizer, at, overflow_at(at)))
            skipped.append(amp.step_was_skipped(optimizer))
        assert skipped == [at % 11 == 5 for at in range(STEPS)], (kind, skipped)
        if kind == "sharded":
            equal_on_ranks(model)
    got, want, exact = (torch.tensor(losses[kind]) for kind in ("sharded", "ddp", "ddp at O0"))
    assert not torch.equal(want, exact)
    rounding = torch.finfo(HALF[level]).eps * exact.max()
    assert (got - want).abs().max() <= 2 * rounding
    assert got[-1] < got[0]


def dtypes_of_everything(level: str) -> None:
    """Shards are float32 and computed with in half; batch norm, inputs, outputs and buffers are as at the level."""
    model, optimizer = made(level)
    seen: dict[str, list[torch.dtype]] = {name: [] for name in ("first", "norm", "last")}
    for name, dtypes in seen.items():
        module = getattr(model, name)
        # Not all in one: when a forward hook runs, the weights are shards again.
        module.register_forward_pre_hook(lambda m, args, to=dtypes: to.extend([m.weight.dtype, args[0].dtype]))
        module.register_forward_hook(lambda m, args, output, to=dtypes: to.append(output.dtype))
    output = model(batch(0))
    half = HALF[level]
    norm = half if level == "O3" else torch.float32
    assert seen == {"first": [half] * 3, "norm": [norm, half, half], "last": [half] * 3}
    assert output.dtype == torch.float32
    assert model.shift.dtype == half
    assert model.norm.running_mean.dtype == norm
    step(model, optimizer, 0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [id(p) for p in amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    assert all(value.dtype in (torch.float32, torch.int64) for value in model.state_dict().values())
    policies = [m._get_fsdp_state()._mp_policy for m in (model, model.first, model.norm)]
    assert [policy.param_dtype for policy in policies] == [half, half, half if level == "O3" else None]
    assert {policy.reduce_dtype for policy in policies} == {torch.float32}


def head() -> Any:
    """One layer, whose first row lies on the first rank and whose last row lies on the last."""
    torch.manual_seed(3)
    ranks = dist.get_world_size()
    model = shard(nn.Linear(4, ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def an_overflow_in_one_shard(level: str) -> None:
    """Only the last rank's shard has a gradient that is not finite: all ranks skip, and lower the scale."""
    model, optimizer = head()
    before = whole(model)
    output = model(batch(0))
    factor = torch.ones(output.shape[1])
    factor[-1] = INF
    backward((output * factor).sum() / 64, optimizer)
    gradient = local_part(next(model.parameters()).grad)
    assert bool(gradient.isfinite().all()) == (dist.get_rank() < dist.get_world_size() - 1)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    assert all(torch.equal(before[name], value) for name, value in whole(model).items())
    optimizer.zero_grad()
    backward(model(batch(2)).sum() / 64, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    equal_on_ranks(model)


def gradients_of(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in amp.master_params(optimizer)]


def accumulated(level: str, how: str) -> list[torch.Tensor]:
    """The gradients of three micro-batches; the scale of the second and third loss is another."""
    model, optimizer = made(level, num_losses=2, keep_batchnorm_fp32=None, loss_scale="dynamic")
    model.eval()  # batch norm by its buffers: micro-batches do not depend on one another
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**10
    for micro in range(3):
        last = micro == 2
        if how == "set_requires_gradient_sync":
            model.set_requires_gradient_sync(last)
        if how == "the second alone waits":
            model.set_requires_gradient_sync(micro != 1)
        loss = model(batch(micro)).float().pow(2).mean() / 64
        delay = how == "delay_unscale" and not last
        backward(loss, optimizer, loss_id=min(micro, 1), delay_unscale=delay)
    return gradients_of(optimizer)


def accumulation(level: str) -> None:
    """Unscaled after each block, at the end, or reduced at the end: the same sum."""
    want = accumulated(level, "each")
    for how in ("delay_unscale", "set_requires_gradient_sync", "the second alone waits"):
        for got, expected in zip(accumulated(level, how), want, strict=True):
            # float32 sums in another order.
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def an_overflow_while_gradients_wait(level: str) -> None:
    """It is found when the gradients are reduced: one step is skipped, on every rank, and the next is clean."""
    model, optimizer = made(level, loss_scale="dynamic")
    for at in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            factor = INF if (at, micro, dist.get_rank()) == (0, 0, 1) else 1.0
            backward(model(batch(micro)).float().pow(2).mean() * factor / 64, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (at == 0)
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    equal_on_ranks(model)


def waiting_gradients_are_dropped(level: str) -> None:
    """``zero_grad`` drops them."""
    model, optimizer = made(level, loss_scale="dynamic")
    model.eval()

    def block(micro: int, sync: bool) -> None:
        model.set_requires_gradient_sync(sync)
        with amp.scale_loss(model(batch(micro)).float().pow(2).mean() / 64, optimizer) as scaled:
            scaled.backward()

    block(0, sync=True)
    want = gradients_of(optimizer)
    for clears in (optimizer, model):
        clears.zero_grad()
        block(1, sync=False)
        clears.zero_grad()
        block(0, sync=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(optimizer), want, strict=True))


def from_level_to_level(level: str) -> None:
    """O1, back, and out of amp: each computes in its own precision, after forwards that left whole weights behind."""
    model, optimizer = made(level)
    step(model, optimizer, 0)
    weights, plain = trained(model), Net()
    for target in ("O1", level, "O0", level, "off", level):
        with torch.no_grad():
            model(batch(0))  # leaves the weights of the outermost unit unsharded
        if target == "off":
            amp.initialize(model, optimizer, enabled=False)
        else:
            amp.initialize(model, optimizer, opt_level=target, verbosity=0)
        seen = []
        handle = model.last.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
        model.eval()
        output = model(batch(0))
        handle.remove()
        assert seen == [HALF[level] if target == level else torch.float32]
        assert model.shift.dtype == seen[0]
        if target in ("O0", "off"):
            plain.load_state_dict(whole(model))
            assert torch.equal(output, plain.eval()(batch(0)))
        assert all(torch.equal(weights[name], value) for name, value in trained(model).items())
        model.train()
    step(model, optimizer, 1)
    equal_on_ranks(model)


def resumes_bitwise(level: str) -> None:
    """``torch.distributed.checkpoint`` saves, and loads into a model of another seed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model, optimizer = made(level, loss_scale="dynamic")
    for at in range(4):
        step(model, optimizer, at, overflow_at(at + 4))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "amp": amp.state_dict()}, checkpoint_id=folder[0])
    buffers = {name: value.clone() for name, value in model.named_buffers()}  # each rank has statistics of its own
    for at in range(4, 7):
        step(model, optimizer, at)
    want = whole(model)
    model, optimizer = made(level, seed=7, loss_scale="dynamic")
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    everything = {**states, "amp": amp.state_dict()}
    dcp.load(everything, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])
    amp.load_state_dict(everything["amp"])
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    for at in range(4, 7):
        step(model, optimizer, at)
    for name, value in whole(model).items():
        assert torch.equal(value, want[name]), name


def optimizers_of_all_kinds(level: str) -> None:
    """Each steps shards as it steps the same model under DDP, within what half rounds off."""
    kinds: dict[str, Callable[..., Any]] = {
        "fused AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
        "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "FusedAdam": optimizers.FusedAdam,
        "FusedSGD": lambda params, lr: optimizers.FusedSGD(params, lr=lr, momentum=0.9),
        "FusedAdagrad": optimizers.FusedAdagrad,
    }
    for name, kind in kinds.items():
        torch.manual_seed(3)
        plain: Any = Net()
        start = {key: value.clone() for key, value in plain.state_dict().items()}
        other = kind(plain.parameters(), lr=1e-2)
        plain, other = amp.initialize(plain, other, opt_level=level, verbosity=0)
        run = DistributedDataParallel(plain)
        model, optimizer = made(level, optimizer=kind)
        for at in range(4):
            step(run, other, at)
            step(model, optimizer, at, INF if (at, dist.get_rank()) == (2, 1) and level == "O2" else 1.0)
            if at == 2 and level == "O2":
                assert amp.step_was_skipped(optimizer), name
                step(model, optimizer, at)
        equal_on_ranks(model)
        want = plain.state_dict()
        for key, value in trained(model).items():
            if key in ("shift", "first.bias"):  # in front of a norm a bias has no gradient but rounding
                continue
            moved = (want[key] - start[key]).abs().max()
            assert moved > 0, (name, key)
            assert (value - want[key]).abs().max() <= 0.3 * moved, (name, key)


def optimizers_that_read_whole_layers(level: str) -> None:
    for kind in (optimizers.FusedLAMB, optimizers.FusedNovoGrad):
        model, optimizer = made(level, optimizer=kind)
        before = whole(model)
        with pytest.raises(RuntimeError, match=f"{kind.__name__} got .* sharded .* norms of whole layers"):
            step(model, optimizer, 0)
        assert all(torch.equal(before[name], value) for name, value in trained(model).items())


def refused(level: str, model: Any, match: str, **options: Any) -> None:
    """``initialize`` raises, before anything is changed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtypes = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    with pytest.raises(RuntimeError, match=match):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    assert dtypes == {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert not is_under_amp(optimizer)


def refused_on_older_torch(level: str) -> None:
    """On torch 2.6 by its version, on later torch as if it were older."""
    with pytest.MonkeyPatch.context() as patch:
        if SHARDS_ON_CPU:
            patch.setattr(_torch.fsdp, "_RUNS_ON_CPU", False)
        lines = "this torch's fully_shard.*opt_level='O0', cast_model_type=False, loss_scale="
        refused(level, shard(Net()), lines)


def what_is_refused(level: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if level != "O3":
        refused(level, fully_shard(Net(), mesh=mesh()), "a BatchNorm1d stays float32.*isinstance.module, BatchNorm1d")
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused(level, fully_shard(layers, mesh=mesh()), "a Linear stays float32.*shard it by itself", keep_fp32="1")
    other = torch.float16 if level == "O5" else torch.bfloat16
    refused(level, shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=other)), f"computes in {other}")
    tensor = torch.distributed.tensor.distribute_tensor(torch.zeros(4, 4), mesh())
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(tensor)
    refused(level, model, "'weight' is a DTensor that fully_shard does not hold")


def kept_modules_and_given_policies(level: str) -> None:
    """``keep_fp32`` for a unit of its own; the script's own choice of dtypes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(3)
    model: Any = Net()
    fully_shard(model.last, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    fully_shard(model.norm, mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=HALF[level]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, keep_fp32="last", verbosity=0)
    seen = []
    model.last.register_forward_hook(lambda m, args, _: seen.append((m.weight.dtype, args[0].dtype)))
    step(model, optimizer, 0)
    assert seen == [(torch.float32, torch.float32)]
    policies = [m._get_fsdp_state()._mp_policy for m in (model, model.norm, model.last)]
    assert [policy.param_dtype for policy in policies] == [HALF[level], torch.float32, None]
    assert [policy.reduce_dtype for policy in policies] == [HALF[level], None, torch.bfloat16]
    amp.initialize(model, optimizer, enabled=False)
    assert model._get_fsdp_state()._mp_policy == MixedPrecisionPolicy(reduce_dtype=HALF[level])


def precision_given_by_hand(level: str) -> None:
    """What the refusal on older torch names: ``fully_shard`` computes in half, and amp scales the loss alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(3)
    policy = MixedPrecisionPolicy(param_dtype=HALF[level], reduce_dtype=torch.float32)
    model = fully_shard(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), mesh=mesh(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": "O0", "cast_model_type": False, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    for at in range(3):
        step(model, optimizer, at, INF if (at, dist.get_rank()) == (1, 1) else 1.0)
        assert amp.step_was_skipped(optimizer) == (at == 1)
    equal_on_ranks(model)


def a_scaler_for_each_shard_mesh(level: str) -> None:
    """Sharded within pairs of ranks and replicated across them: all four skip together."""
    if dist.get_world_size() != 4:
        return
    from torch.distributed.fsdp import fully_shard

    grid = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = fully_shard(nn.Linear(4, 2), mesh=grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for at in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            output = model(batch(at * 2 + micro))
            factor = torch.ones(2)
            factor[1] = INF if (at, micro, dist.get_rank()) == (1, 0, 2) else 1.0
            backward((output * factor).sum() / 64, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (at == 1)
    equal_on_ranks(model)


CASTING = ["O2", "O3", "O5"]
CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (trains_as_in_plain_torch, ["O0", "O1", "O4"]),
    (after_initialize, MASTERS),
    (trains_as_under_ddp, CASTING),
    (dtypes_of_everything, CASTING),
    (an_overflow_in_one_shard, ["O2"]),
    (accumulation, ["O1", *CASTING]),
    (an_overflow_while_gradients_wait, ["O1", *CASTING]),
    (waiting_gradients_are_dropped, ["O1", "O2"]),
    (from_level_to_level, CASTING),
    (resumes_bitwise, ["O1", *CASTING]),
    (optimizers_of_all_kinds, ["O2", "O5"]),
    (optimizers_that_read_whole_layers, ["O1", "O2"]),
    (refused_on_older_torch, CASTING),
    (what_is_refused, CASTING),
    (kept_modules_and_given_policies, ["O2", "O5"]),
    (precision_given_by_hand, ["O2"]),
    (a_scaler_for_each_shard_mesh, ["O2"]),
]
if not SHARDS_ON_CPU:
    CHECKS = [(refused_on_older_torch, CASTING)] if MAKES_SHARDS_ON_CPU else []
