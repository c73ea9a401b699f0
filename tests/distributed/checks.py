"""What every rank runs; each function is one check. ``launch.py`` and ``torchrun`` start them."""

from __future__ import annotations

import contextlib
import copy
import io
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from internals import float32_masters, masters_of, reset
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp, amp_C, apex_C, parallel
from ampcompat._torch import TORCH

#: torch 2.6 makes shards on the CPU, but its first forward fails: ``Stream`` has no ``record_event`` there.
MAKES_SHARDS_ON_CPU = Version("2.6") <= TORCH
SHARDS_ON_CPU = Version("2.7") <= TORCH
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)).relu())


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def equal_on_ranks(tensors: Iterable[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        mine = tensor.detach().float().contiguous()
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        for rank, other in enumerate(theirs):
            assert torch.equal(other, theirs[0]), f"tensor {index} of rank {rank} differs from rank 0's"


def everything_is_equal(model: nn.Module, optimizer: Any) -> None:
    equal_on_ranks(model.parameters())
    equal_on_ranks(amp.master_params(optimizer))
    for master in masters_of(model):
        assert torch.equal(master.half.detach(), master.value.detach().to(master.half.dtype))
    scales: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scales, amp.state_dict())
    assert all(one == scales[0] for one in scales), scales


def made(
    level: str,
    seed: int | None = None,
    wrap: Any = DistributedDataParallel,
    momentum: float = 0.9,
    **options: Any,
) -> Any:
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer, wrap(model)


def backward(loss: torch.Tensor, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def step(run: Any, optimizer: Any, at: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    backward(run(batch(at)).float().pow(2).mean() * factor, optimizer)
    optimizer.step()


#: How a model is wrapped; the last three are of the project's own DDP.
WRAPS: dict[str, Any] = {
    "DDP": DistributedDataParallel,
    "inside another module": lambda model: DistributedDataParallel(nn.Sequential(model, nn.Tanh())),
    "ours": parallel.DistributedDataParallel,
    "ours, delayed": lambda model: parallel.DistributedDataParallel(model, delay_allreduce=True),
    "ours, in small messages": lambda model: parallel.DistributedDataParallel(model, message_size=64),
}


def different_seeds(level: str) -> None:
    for wrap in WRAPS.values():
        model, optimizer, run = made(level, wrap=wrap)
        everything_is_equal(model, optimizer)
        for at in range(3):
            step(run, optimizer, at)
            everything_is_equal(model, optimizer)


def masters_are_rank_0s_to_the_last_bit(level: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    exact = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    DistributedDataParallel(model)
    for want, master in zip(exact, amp.master_params(optimizer), strict=True):
        dist.broadcast(want, 0)
        assert torch.equal(want, master.float()) or level == "O3"


def state_dict_on_rank_0_alone_before_wrapping(level: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    for param in model.a.parameters():
        param.requires_grad_(False)  # no optimizer: its master is made when the state dict is
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=0.05)
    optimizer.add_param_group({"params": model.b.parameters()})
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if dist.get_rank() == 0:
        model.state_dict()
    run = DistributedDataParallel(model)
    for at in range(3):
        step(run, optimizer, at)
    everything_is_equal(model, optimizer)


def masters_of_two_layouts(level: str) -> None:
    """Rank 0 makes its masters before the weights are laid out anew, the others afterwards."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if dist.get_rank() == 0:
        model.state_dict()
    model.to(memory_format=torch.channels_last)
    model.state_dict()
    DistributedDataParallel(model)
    everything_is_equal(model, optimizer)
    equal_on_ranks(model.state_dict().values())


def overflow_on_one_rank(level: str) -> None:
    model, optimizer, run = made(level)
    step(run, optimizer, 0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    step(run, optimizer, 1, factor=float("inf") if dist.get_rank() == 1 else 1.0)
    if level in ("O1", "O2"):
        assert amp.step_was_skipped(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
        everything_is_equal(model, optimizer)
        step(run, optimizer, 2)
        assert not amp.step_was_skipped(optimizer)
        everything_is_equal(model, optimizer)


def sync_batch_norm(level: str) -> None:
    """Statistics over all ranks: the same step as one process with all the data, to the level's precision."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = parallel.convert_syncbn_model(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run = parallel.DistributedDataParallel(model)
    everything = torch.cat([batch(0, rank) for rank in range(dist.get_world_size())])
    step(run, optimizer, 0, factor=1 / 64)
    with amp.disable_casts():
        plain(everything)
    # A linear layer in half is off by 2^-11 (float16) or 2^-8 (bfloat16) of values of the order of one.
    loose = {"O0": 1e-5, "O5": 2e-2}.get(level, 2e-3)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=loose, atol=loose)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var, rtol=loose, atol=loose)
    for at in range(1, 3):
        step(run, optimizer, at, factor=1 / 64)
    everything_is_equal(model, optimizer)
    equal_on_ranks([model[1].running_mean, model[1].running_var])


def two_losses(level: str) -> Any:
    parts = made(level, seed=3, momentum=0.0, num_losses=2)
    if level in ("O1", "O2"):
        amp._amp_state.loss_scalers[1]._loss_scale = 2.0**12
    return parts


def part_of_a_loss(run: Any, at: int, rank: int | None = None) -> torch.Tensor:
    return run(batch(at, rank)).float().pow(2).mean().div(64)


def gradients_are_those_of_one_process(level: str, optimizer: Any, alone: nn.Module, parts: Iterable[int]) -> None:
    """Equal on all ranks, and what ``alone`` makes of ``parts`` of the data of all of them."""
    grads = [p.grad.detach().float().clone() for p in amp.master_params(optimizer)]
    equal_on_ranks(grads)
    alone.zero_grad()
    for rank in range(dist.get_world_size()):
        for at in parts:
            part_of_a_loss(alone, at, rank).div(dist.get_world_size()).backward()
    for got, param in zip(grads, alone.parameters(), strict=True):
        # Half gradients are accumulated and averaged in half, in another order.
        loose = {"O0": 1e-6, "O4": 3e-2, "O5": 3e-2}.get(level, 1e-2)
        torch.testing.assert_close(got, param.grad.float(), rtol=loose, atol=loose * got.abs().max().item())


def accumulation_with_no_sync(level: str) -> None:
    model, optimizer, run = made(level, seed=3)
    alone = copy.deepcopy(model)
    for at in range(3):
        optimizer.zero_grad()
        with run.no_sync():
            for micro in (0, 1):
                backward(part_of_a_loss(run, 10 * at + micro), optimizer)
        backward(part_of_a_loss(run, 10 * at + 2), optimizer)
        if at == 0:
            gradients_are_those_of_one_process(level, optimizer, alone, parts=(0, 1, 2))
        optimizer.step()
        everything_is_equal(model, optimizer)


def several_losses_with_no_sync(level: str) -> None:
    """Each loss with a scaler of its own, the scale moved in between: averaged like one."""
    model, optimizer, run = two_losses(level)
    alone = copy.deepcopy(model)
    with run.no_sync():
        for loss_id in (0, 1, 0):
            backward(part_of_a_loss(run, loss_id), optimizer, loss_id=loss_id)
            if level in ("O1", "O2"):
                amp._amp_state.loss_scalers[loss_id]._loss_scale = 2.0 ** (13 + loss_id)
    backward(part_of_a_loss(run, 2), optimizer, loss_id=1)
    gradients_are_those_of_one_process(level, optimizer, alone, parts=(0, 1, 0, 2))
    optimizer.step()
    everything_is_equal(model, optimizer)


def overflow_of_one_of_several_losses_with_no_sync(level: str) -> None:
    """Which loss it was is known on one rank at most: all ranks skip, and every scaler of the step backs off."""
    model, optimizer, run = two_losses(level)
    with run.no_sync():
        loss = part_of_a_loss(run, 0) * (float("inf") if dist.get_rank() == 1 else 1.0)
        backward(loss, optimizer, loss_id=0)
    backward(part_of_a_loss(run, 1), optimizer, loss_id=1)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    everything_is_equal(model, optimizer)
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [2.0**15, 2.0**11]


def a_block_that_raises_after_no_sync(level: str) -> None:
    """What its backward pass has added stays, as in plain torch; all ranks have the same gradients in the end."""

    class Stop(Exception):
        pass

    model, optimizer, run = two_losses(level)

    def accumulated(*parts: int, fail: str = "") -> list[torch.Tensor]:
        optimizer.zero_grad()
        for part in parts:
            with run.no_sync(), amp.scale_loss(part_of_a_loss(run, part), optimizer) as scaled:
                scaled.backward()
        if fail:
            try:  # a synchronised forward without its backward would have DDP reduce the next pass
                with run.no_sync() if fail == "before" else contextlib.nullcontext():
                    loss = part_of_a_loss(run, 1)
                with amp.scale_loss(loss, optimizer) as scaled:
                    if fail == "after":
                        scaled.backward()
                    raise Stop
            except Stop:
                pass
        backward(part_of_a_loss(run, 2), optimizer)
        return [p.grad.detach().clone() for p in amp.master_params(optimizer)]

    accumulated(0)  # DDP lays its buckets out anew after its first backward, and gloo sums in bucket order
    for got, want in zip(accumulated(0, fail="before"), accumulated(0), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(accumulated(0, fail="after"), accumulated(0, 1), strict=True):
        # The failed pass was averaged: sums are rounded in another order, at O2 in half.
        torch.testing.assert_close(got, want, rtol=2e-3 if level == "O2" else 1e-6, atol=1e-6)
    optimizer.step()
    everything_is_equal(model, optimizer)


def gradient_as_bucket_view(level: str) -> None:
    results = []
    for view in (False, True):
        model, optimizer, run = made(level, seed=3, wrap=partial(DistributedDataParallel, gradient_as_bucket_view=view))
        for at in range(3):
            optimizer.zero_grad()
            for micro in (0, 1):
                backward(run(batch(10 * at + micro)).float().pow(2).mean(), optimizer)
            optimizer.step()
        everything_is_equal(model, optimizer)
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def resume(level: str) -> None:
    model, optimizer, run = made(level)
    for at in range(3):
        step(run, optimizer, at)
    buffer = io.BytesIO()
    parts = {"model": run.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(parts, buffer)
    # DDP lays its buckets out anew after its first backward, and gloo sums in bucket order: start both alike.
    run = DistributedDataParallel(model)
    for at in range(3, 5):
        step(run, optimizer, at)
    want = [p.detach().clone() for p in amp.master_params(optimizer)]
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model, optimizer, run = made(level, seed=50 + dist.get_rank())
    run.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    for at in range(3, 5):
        step(run, optimizer, at)
    assert all(torch.equal(a, b) for a, b in zip(want, amp.master_params(optimizer), strict=True))
    everything_is_equal(model, optimizer)


def o0_is_plain_ddp(level: str) -> None:
    model, optimizer, run = made("O0", seed=3)
    torch.manual_seed(3)
    plain = Net()
    other = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    plain_run = DistributedDataParallel(plain)
    for at in range(3):
        step(run, optimizer, at)
        other.zero_grad()
        plain_run(batch(at)).pow(2).mean().backward()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def a_write_on_every_rank_by_broadcast(level: str) -> None:
    """``dist.broadcast(p.data)`` moves no version counter; master_params make the low bits equal."""
    model, optimizer, _run = made(level, wrap=lambda model: model)
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    for param in amp.master_params(optimizer):
        dist.broadcast(param.data, 0)
    model(batch(0))
    everything_is_equal(model, optimizer)


MASTERS = ["O2", "O5"]


def reduced_after_accumulation(level: str) -> None:
    """NVIDIA's BERT: blocks leave the overflow check to the script, which reduces once a step, by one half tensor."""
    model, optimizer, _ = made(level, seed=0, wrap=lambda module: module)
    scaler, buffer = amp._amp_state.loss_scalers[0], torch.zeros(1, dtype=torch.int)
    skips = []
    for at in range(6):
        for block in range(2):
            factor = float("inf") if (at, block) == (2, 0) and dist.get_rank() == 1 else 1.0
            loss = model(batch(2 * at + block)).float().pow(2).mean() * factor / 2
            backward(loss, optimizer, delay_overflow_check=True)
        grads = [p.grad for p in amp.master_params(optimizer)]
        flat = torch.empty(sum(g.numel() for g in grads), dtype=torch.float16)
        views, scale = apex_C.unflatten(flat, grads), scaler.loss_scale()
        buffer.zero_()
        amp_C.multi_tensor_scale(65536, buffer, [grads, views], scale / dist.get_world_size())
        dist.all_reduce(flat)
        buffer.zero_()
        amp_C.multi_tensor_scale(65536, buffer, [views, grads], 1.0 / scale)
        scaler._overflow_buf = buffer
        skips.append(scaler.update_scale())
        if not skips[-1]:
            optimizer.step()
            assert not amp.step_was_skipped(optimizer)
        for param in (*float32_masters(optimizer), *model.parameters()):
            param.grad = None
        everything_is_equal(model, optimizer)
    assert skips == [False, False, True, False, False, False]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 3}
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))


CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (different_seeds, LEVELS),
    (masters_are_rank_0s_to_the_last_bit, MASTERS),
    (state_dict_on_rank_0_alone_before_wrapping, MASTERS),
    (masters_of_two_layouts, MASTERS),
    (overflow_on_one_rank, ["O1", "O2"]),
    (reduced_after_accumulation, ["O1", "O2"]),
    (sync_batch_norm, ["O0", "O1", "O2", "O5"]),
    (accumulation_with_no_sync, LEVELS),
    (several_losses_with_no_sync, LEVELS),
    (overflow_of_one_of_several_losses_with_no_sync, ["O1", "O2"]),
    (a_block_that_raises_after_no_sync, ["O1", "O2"]),
    (gradient_as_bucket_view, LEVELS),
    (resume, LEVELS),
    (o0_is_plain_ddp, ["O0"]),
    (a_write_on_every_rank_by_broadcast, MASTERS),
]


def run_all(checks: list[tuple[Callable[[str], None], list[str]]]) -> dict[str, str]:
    """Run ``checks``; returns the traceback of each that failed on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = {}
    for check, levels in checks:
        for level in levels:
            try:
                check(level)
            except BaseException:
                failed[f"{check.__name__}-{level}"] = traceback.format_exc()
            finally:
                reset()
            dist.barrier()
    return failed
