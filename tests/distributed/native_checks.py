"""Checks of ``native_amp.py``, the file that ``migrate --to native`` copies, under DDP; each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from checks import Net, batch, everything_is_equal
from native_file import native_amp
from torch.nn.parallel import DistributedDataParallel

INF = float("inf")
LEVELS = ("O0", "O1")


def made(level: str, **options: Any) -> tuple[ModuleType, Any, Any]:
    """The file, and a model in DDP and its optimizer; at O0 nothing is rounded to half."""
    native = native_amp()
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    native.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=2.0**10, verbosity=0)
    return native, DistributedDataParallel(model, **options), optimizer


def accumulate(native: ModuleType, run: Any, optimizer: Any, at: int, factors: tuple[float, ...], **more: Any) -> None:
    """Three backward passes; the last one averages over the ranks."""
    for index, factor in enumerate(factors):
        is_last = index == len(factors) - 1
        with nullcontext() if is_last else run.no_sync():
            loss = run(batch(3 * at + index)).float().pow(2).mean() * factor
            given = {} if is_last else more
            with native.scale_loss(loss, optimizer, **given) as scaled:
                scaled.backward()


def gradients(run: Any) -> list[torch.Tensor]:
    return [param.grad.clone() for param in run.parameters()]


def native_accumulates_in_no_sync(level: str) -> None:
    """The gradients of plain DDP, after a step too, whether the script delays or not."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        for more in ({}, {"delay_unscale": True}):
            native, run, optimizer = made(level, **options)
            for at in range(3):
                optimizer.zero_grad()
                accumulate(native, run, optimizer, at, (1.0, 0.5, 0.25), **more)
                found = gradients(run)
                optimizer.zero_grad()
                for index, factor in enumerate((1.0, 0.5, 0.25)):
                    with nullcontext() if index == 2 else run.no_sync():
                        (run(batch(3 * at + index)).float().pow(2).mean() * factor).backward()
                # DDP lays its buckets out anew after its first backward pass, and gloo sums more than two ranks in the
                # order of buckets.
                tolerance = 1e-4 if level == "O0" else 2.0**-7
                for got, want in zip(found, gradients(run), strict=True):
                    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 16)
                optimizer.step()
            everything_is_equal(run.module, optimizer)


def native_accumulates_over_averaged_gradients(level: str) -> None:
    """Without ``no_sync``, each block's gradients are averaged, and added to those before it."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        native, run, optimizer = made(level, **options)
        for at in range(2):
            optimizer.zero_grad()
            sums = [torch.zeros_like(param) for param in run.parameters()]
            for index in range(3):
                before = [None if param.grad is None else param.grad.clone() for param in run.parameters()]
                with native.scale_loss(run(batch(3 * at + index)).float().pow(2).mean(), optimizer) as scaled:
                    scaled.backward()
                for total, grad, old in zip(sums, gradients(run), before, strict=True):
                    total += grad if old is None else grad - old
            for total, grad in zip(sums, gradients(run), strict=True):
                torch.testing.assert_close(total, grad, rtol=1e-5, atol=1e-6)
                assert grad.abs().max() < 100
            everything_is_equal(run.module, optimizer)
            optimizer.step()


def native_overflows_on_one_rank(level: str) -> None:
    """An overflow in ``no_sync`` of one rank skips the step of all, and halves the scale of all once."""
    for bad in range(3):
        native, run, optimizer = made(level)
        before = [param.detach().clone() for param in run.parameters()]
        factors = [1.0, 1.0, 1.0]
        factors[bad] = INF if dist.get_rank() == 1 else 1.0
        accumulate(native, run, optimizer, 0, tuple(factors))
        optimizer.step()
        assert native.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 0}}
        assert all(map(torch.equal, run.parameters(), before))
        optimizer.zero_grad()
        accumulate(native, run, optimizer, 1, (1.0, 1.0, 1.0))
        optimizer.step()
        assert not all(map(torch.equal, run.parameters(), before))
        everything_is_equal(run.module, optimizer)


def native_block_fails_on_one_rank(level: str) -> None:
    """The others do not wait for it, and scales stay equal."""
    native, run, optimizer = made(level)
    try:
        with native.scale_loss(run(batch(0)).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
            if dist.get_rank() == 1:
                raise KeyError
    except KeyError:
        optimizer.zero_grad()
    optimizer.zero_grad()
    accumulate(native, run, optimizer, 1, (1.0, 1.0))
    optimizer.step()
    assert native.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**10
    everything_is_equal(run.module, optimizer)


CHECKS: list[tuple[Callable[[str], None], tuple[str, ...]]] = [
    (native_accumulates_in_no_sync, LEVELS),
    (native_accumulates_over_averaged_gradients, LEVELS),
    (native_overflows_on_one_rank, LEVELS),
    (native_block_fails_on_one_rank, LEVELS),
]
