"""DistributedDataParallel on two processes, each with a half of the batch, of which one overflows once.

Both must skip that step and keep equal weights and scales, and train as one process does on the whole batch.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, spawn

from ampcompat import amp
from ampcompat.tools.selftest.checks import Failed, batch, build, expect, fresh, step

#: Seconds that the ranks may take, the import of torch included.
TIMEOUT = 120
WORLD = 2
LEVELS = ("O1", "O2")


def can_start(device_type: str) -> bool:
    """Whether the machine has a device for each rank, and torch the backend for them."""
    if not dist.is_available():
        return False
    if device_type == "cuda":
        return torch.cuda.device_count() >= WORLD and dist.is_nccl_available()
    return device_type == "cpu" and dist.is_gloo_available()


@contextmanager
def started(device_type: str) -> Iterator[Callable[[], str]]:
    """Run the ranks beside the block; what it yields waits for them. None is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="ampcompat-test-", ignore_cleanup_errors=True) as folder:
        store = os.path.join(folder, "store")
        context: ProcessContext = spawn(_rank, (store, device_type), WORLD, join=False)  # type: ignore[no-untyped-call]
        try:
            yield lambda: _wait(context)
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _wait(context: ProcessContext) -> str:
    """Wait for all ranks, and raise :class:`Failed` with the last line of one that failed."""
    deadline = time.monotonic() + TIMEOUT
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            expect(time.monotonic() < deadline, f"no end within {TIMEOUT} s")
    except (ProcessRaisedException, ProcessExitedException) as problem:
        raise Failed(str(problem).strip().splitlines()[-1]) from None
    return f"{WORLD} processes: equal weights, one overflow skipped by all"


def _rank(rank: int, store: str, device_type: str) -> None:
    """Train as one of the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for level in LEVELS:
        together = _train(level, device, rank, WORLD)
        alone = _train(level, device, 0, 1)
        close = all(torch.allclose(a, b, rtol=0.02, atol=2e-3) for a, b in zip(together, alone, strict=True))
        expect(close, f"{level}: two processes train otherwise than one does on the whole batch")
    dist.barrier()
    os._exit(0)  # without the end of the interpreter, which gloo's threads may disturb


def _train(level: str, device: torch.device, rank: int, world: int) -> list[torch.Tensor]:
    """The weights after four steps, the third of which overflows on one rank; ``world`` 1 trains on the whole batch."""
    images, kinds = batch(device)
    part = images[rank::world], kinds[rank::world]
    with fresh():
        model, optimizer = build(device)
        model[1] = torch.nn.Identity()  # a batch norm sees its own half of the batch
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
        for number in range(4):
            step(trained, optimizer, part, math.inf if number == 2 and rank == world - 1 else 1.0)
            skipped = amp.step_was_skipped(optimizer)
            expect(skipped == (number == 2), f"{level}: the ranks disagree whether step {number + 1} is skipped")
        weights = [param.detach().clone() for param in amp.master_params(optimizer)]
        scale = torch.tensor(amp.state_dict()["loss_scaler0"]["loss_scale"], dtype=torch.float32, device=device)
    for tensor in [*weights, scale] if world > 1 else []:
        of_first = tensor.clone()
        dist.broadcast(of_first, 0)
        expect(torch.equal(of_first, tensor), f"{level}: the weights or the loss scale of the ranks differ")
    return weights
