"""Checks on two gloo processes."""

import datetime
import functools
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist
from internals import reset
from process_group import destroy_process_group


def run_on_two_processes(checks):
    """Call each of ``checks`` with the rank in two processes.

    They are forked from a server that has imported torch and run nothing: the autograd engine's threads, which a fork
    does not survive, are not there.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    _start_server()
    torch.multiprocessing.start_processes(_run, (port, checks), nprocs=2, start_method="forkserver")


@functools.cache
def _start_server():
    """Start the server, which looks for the modules that it imports first where ``PYTHONPATH`` says."""
    multiprocessing.set_forkserver_preload(["imported_once"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


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
