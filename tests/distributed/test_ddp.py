"""Data parallelism over gloo: ``checks.py`` and ``zero_checks.py`` on two ranks (by torchrun) and on four."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zero_checks
from checks import CHECKS

HERE = Path(__file__).parent
NAMES = [f"{check.__name__}-{level}" for check, levels in [*CHECKS, *zero_checks.CHECKS] for level in levels]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda world: f"{world} ranks")
def failures(request, tmp_path_factory):
    """What failed, by check and rank: one launch serves every test."""
    world, directory, port = request.param, tmp_path_factory.mktemp("ranks"), free_port()
    script = [str(HERE / "launch.py")]
    if world == 2:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
        command += [*script, str(directory)]
    else:
        command = [sys.executable, *script, str(world), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TEST_PORT": port, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    found: dict[str, dict[int, str]] = {}
    for rank in range(world):
        path = directory / f"{rank}.json"
        assert path.exists(), f"rank {rank} did not finish:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        for name, text in json.loads(path.read_text()).items():
            found.setdefault(name, {})[rank] = text
    assert (run.returncode != 0) is bool(found), run.stderr[-4000:]
    return found


def test_a_rank_that_dies_is_told_of(tmp_path):
    command = [sys.executable, str(HERE / "launch.py"), "1", str(tmp_path / "not" / "there")]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TEST_PORT": "no port"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "Traceback" in run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(failures, name):
    assert not failures.get(name), "\n".join(failures[name].values())
