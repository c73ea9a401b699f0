"""Checks on two gloo processes."""

import datetime
import socket
import time

import torch
import torch.distributed as dist
from internals import reset


def run_on_two_processes(checks):
    """Call each of ``checks`` with the rank in two processes: forked if they can be, since torch takes long to import.

    Beside a GPU the autograd engine has threads, which a fork does not survive.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(_run, (port, checks), nprocs=2, start_method=method)


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
