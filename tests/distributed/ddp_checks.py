"""Checks of what DDP offers beyond a plain wrap; each function is one check, run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from checks import LEVELS, Net, batch, everything_is_equal, made, step

from ampcompat import amp

INF = float("inf")
#: float16 products have 11 bits, bfloat16's have 8; a hook may round once more.
LOOSE = {"O0": 2.0**-9, "O1": 2.0**-8, "O2": 2.0**-8, "O3": 2.0**-7, "O4": 2.0**-4, "O5": 2.0**-4}


def hooked(level: str, hook: Any, hook_state: Any = None) -> list[torch.Tensor]:
    """The weights after some steps; where the scale is dynamic, one of them overflows on one rank."""
    model, optimizer, run = made(level, seed=3)
    if hook is not None:
        run.register_comm_hook(hook_state, hook)
    dynamic = level in ("O1", "O2")
    for at in range(8):
        bad = dynamic and at == 4
        step(run, optimizer, at, factor=INF if bad and dist.get_rank() == 1 else 1 / 64)
        assert amp.step_was_skipped(optimizer) == bad, at
        everything_is_equal(model, optimizer)
    return [p.detach().float().clone() for p in amp.master_params(optimizer)]


def compression_hooks(level: str) -> None:
    """``fp16_compress_hook``: the steps of plain DDP, within what it rounds off. (torch has no bfloat16's on gloo.)"""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    want = hooked(level, None)
    torch.manual_seed(3)
    start = [p.detach() for p in Net().parameters()]
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        for got, exact, first in zip(hooked(level, hook), want, start, strict=True):
            assert (got - exact).abs().max() <= LOOSE[level] * (exact - first).abs().max()


def power_sgd(level: str) -> None:
    """It keeps what it cut off of earlier gradients, so that it needs a static scale, as in plain torch."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model, optimizer, run = made(level, seed=3, loss_scale=128.0 if level in ("O1", "O2") else None)
    hook_state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    run.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    losses = []
    for at in range(12):
        losses.append(run(batch(0)).float().pow(2).mean().item())
        step(run, optimizer, 0)
        everything_is_equal(model, optimizer)
    assert min(losses) < losses[0] / 2, losses  # momentum swings


def uneven_inputs(level: str) -> None:
    """``join()``: afterwards all ranks have the weights, masters and scales of one that had the most inputs."""
    model, optimizer, run = made(level, seed=3, momentum=0.0)
    last = dist.get_rank() == dist.get_world_size() - 1
    with run.join():
        for at in range(6 if last else 3):
            # The others have no inputs left when this one overflows.
            step(run, optimizer, at, factor=INF if at == 4 and level in ("O1", "O2") else 1 / 64)
    everything_is_equal(model, optimizer)
    if level in ("O1", "O2"):
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 1}
    for at in range(6, 9):
        step(run, optimizer, at, factor=1 / 64)
        assert not amp.step_was_skipped(optimizer)
    everything_is_equal(model, optimizer)


CHECKS: list[tuple[Callable[[str], None], list[str]]] = [
    (compression_hooks, LEVELS),
    (power_sgd, LEVELS),
    (uneven_inputs, LEVELS),
]
