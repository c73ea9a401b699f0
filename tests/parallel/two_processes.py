"""Checks on two gloo processes."""

import datetime
import socket
import time

import torch
import torch.distributed as dist
from internals import reset


def run_on_two_processes(checks):
    """Call each of ``checks`` with the rank in two processes, forked: torch takes long to import."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(_run, (port, checks), nprocs=2, start_method="fork")


def _run(rank, port, checks):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        for check in checks:
            check(rank)
            reset()
    finally:
        # torch joins gloo's threads with the GIL held, which they need for the last Python objects that they drop.
        time.sleep(0.2)
        dist.destroy_process_group()
