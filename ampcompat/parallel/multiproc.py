"""``python -m ampcompat.parallel.multiproc script.py args...``: one process a device, by ``torch.distributed.run``."""

from __future__ import annotations

import sys

import torch


def launch_arguments(arguments: list[str], devices: int) -> list[str]:
    """Arguments for ``torch.distributed.run``: as many processes as ``--world-size`` says, else one a device."""
    count = max(1, devices)
    if "--world-size" in arguments[:-1]:
        count = int(arguments[arguments.index("--world-size") + 1])
    return ["--standalone", f"--nproc_per_node={count}", *arguments]


def main() -> None:
    """Start the processes and wait for them; ranks are in the environment (RANK, LOCAL_RANK, WORLD_SIZE)."""
    from torch.distributed.run import main as run

    run(launch_arguments(sys.argv[1:], torch.cuda.device_count()))


if __name__ == "__main__":
    main()
