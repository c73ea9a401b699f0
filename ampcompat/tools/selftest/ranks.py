"""DistributedDataParallel on two processes: ``python -m ampcompat.tools.selftest.ranks FILE RANK WORLD DEVICE``.

Each rank trains on a half of the batch; one of them overflows once. All must skip that step, and keep equal weights
and scales; and the training must be that of one process on the whole batch.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ampcompat.amp.frontend import OptLevel

#: Seconds that the ranks may take, the import of torch included.
TIMEOUT = 120
WORLD = 2


class Ranks:
    """The processes of one check, which run beside the checks of this process."""

    def __init__(self, folder: Path, device_type: str) -> None:
        self.outputs = [folder / f"{device_type}-{rank}" for rank in range(WORLD)]
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMPCOMPAT_")}
        environment.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
        self.processes = []
        for rank, output in enumerate(self.outputs):
            command = [sys.executable, "-m", __name__, str(folder / f"{device_type}-store")]
            command += [str(rank), str(WORLD), device_type]
            with output.open("wb") as file:
                self.processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))

    def problem(self) -> str:
        """Wait for all ranks; say in a line what went wrong, or "" for nothing."""
        for process, output in zip(self.processes, self.outputs, strict=True):
            try:
                status = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                return f"no end within {TIMEOUT} s"
            if status:
                lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                return lines[-1] if lines else f"exit status {status}"
        return ""

    def end(self) -> None:
        """End what is still there."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def started(device_types: list[str]) -> Iterator[dict[str, Ranks]]:
    """The ranks of each device type; none is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="ampcompat-test-", ignore_cleanup_errors=True) as folder:
        groups: dict[str, Ranks] = {}
        try:
            for device_type in device_types:
                groups[device_type] = Ranks(Path(folder), device_type)
            yield groups
        finally:
            for ranks in groups.values():
                ranks.end()


def main(file: str, rank: int, world: int, device_type: str) -> None:
    """Run one rank; a Failed is its last line."""
    import torch
    import torch.distributed as dist

    from ampcompat.tools.selftest.checks import Failed

    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{file}", rank=rank, world_size=world
    )
    levels: tuple[OptLevel, ...] = ("O1", "O2")
    for level in levels:
        together = _train(level, device, rank, world)
        alone = _train(level, device, 0, 1)
        for ours, expected in zip(together, alone, strict=True):
            if not torch.allclose(ours, expected, rtol=0.02, atol=2e-3):
                raise Failed(f"{level}: two processes train otherwise than one does on the whole batch")
    dist.barrier()
    os._exit(0)  # without the end of the interpreter, which gloo's threads may disturb


def _train(level: OptLevel, device: torch.device, rank: int, world: int) -> list[torch.Tensor]:
    """The weights after four steps, the third of which overflows on one rank; ``world`` 1 trains on the whole batch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ampcompat import amp
    from ampcompat.tools.selftest.checks import Failed, batch, build, fresh, step

    images, kinds = batch(device)
    part = images[rank::world], kinds[rank::world]
    with fresh():
        model, optimizer = build(device)
        model[1] = torch.nn.Identity()  # a batch norm sees its own half of the batch
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        trained = DistributedDataParallel(model) if world > 1 else model
        for number in range(4):
            step(trained, optimizer, part, math.inf if number == 2 and rank == world - 1 else 1.0)
            if amp.step_was_skipped(optimizer) != (number == 2):
                raise Failed(f"{level}: rank {rank}, step {number + 1}: skipped or not, the ranks disagree")
        weights = [p.detach().clone() for p in amp.master_params(optimizer)]
        scale = torch.tensor(amp.state_dict()["loss_scaler0"]["loss_scale"], device=device)
    if world > 1:
        _check_equal([*weights, scale], level)
    return weights


def _check_equal(tensors: list[torch.Tensor], level: OptLevel) -> None:
    """Raise where a tensor differs from that of rank 0."""
    import torch
    import torch.distributed as dist

    from ampcompat.tools.selftest.checks import Failed

    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, tensor):
            raise Failed(f"{level}: the weights or the loss scale of the ranks differ")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
