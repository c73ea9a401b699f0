"""Process groups of tests: of one process, which is this one, and of two."""

import contextlib
import datetime
import functools
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist
from internals import reset


def free_port():
    """Return a port at which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def destroy_process_group():
    """Destroy the default group, a moment after its last collective.

    torch 2.4 joins gloo's threads with the GIL held. A thread that still drops the last reference to a tensor needs it,
    and both would wait for ever.
    """
    time.sleep(0.2)
    dist.destroy_process_group()


@contextlib.contextmanager
def process_group_of_one():
    """Make this process the only rank of the default group; tests ask for the fixture ``group_of_one``."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy_process_group()


def run_on_two_processes(check):
    """Call ``check(rank)`` in two processes; when it fails on one rank, the other is ended, and this raises.

    The processes are forked from a server that has imported torch and run nothing: the autograd engine has no threads
    there, which a fork does not survive. ``check`` is a function of a module, where such a process finds it.
    """
    _start_server()
    torch.multiprocessing.start_processes(_run, (free_port(), check), nprocs=2, start_method="forkserver")


@functools.cache
def _start_server():
    """Start the server, which looks for ``imported_once.py`` where ``PYTHONPATH`` says."""
    multiprocessing.set_forkserver_preload(["imported_once"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _run(rank, port, check):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(minutes=10),
    )
    try:
        check(rank)
        reset()
    finally:
        destroy_process_group()
