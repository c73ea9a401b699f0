"""Checks on two gloo processes."""

import datetime
import socket

import torch
import torch.distributed as dist
from internals import reset
from packaging.version import Version
from process_group import destroy_process_group

from ampcompat._torch import TORCH


def run_on_two_processes(checks):
    """Call each of ``checks`` with the rank in two processes: forked if they can be, since torch takes long to import.

    Beside a GPU the autograd engine has threads, which a fork does not survive; from torch 2.14 on, other tests may
    have started some without a GPU, too.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    may_have_threads = torch.cuda.is_available() or Version("2.14") <= TORCH
    method = "spawn" if may_have_threads else "fork"
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
