"""Checks on two gloo processes."""

import datetime
import socket

import torch
import torch.distributed as dist
from internals import reset
from process_group import destroy_process_group


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
        timeout=datetime.timedelta(minutes=10),
    )
    try:
        for check in checks:
            check(rank)
            reset()
    finally:
        destroy_process_group()
