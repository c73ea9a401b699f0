"""Several processes over gloo: ``all_checks.py`` on two ranks; slowly by torchrun, on four, and for more steps."""

import json
import os
import socket
from pathlib import Path

import pytest
from all_checks import CHECKS
from python_process import PATH_WITH_TESTS, run_python

HERE = Path(__file__).parent
NAMES = [f"{check.__name__}-{level}" for check, levels in CHECKS for level in levels]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


#: Ranks, how they are started, and the steps of runs that are compared.
LAUNCHES = [
    pytest.param((2, "fork", 20), id="2 ranks"),
    pytest.param((2, "torchrun", 200), id="2 ranks by torchrun", marks=pytest.mark.slow),
    pytest.param((4, "fork", 200), id="4 ranks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=LAUNCHES)
def failures(request, tmp_path_factory):
    """What failed, by check and rank: one launch serves every test."""
    world, how, steps = request.param
    directory, port = tmp_path_factory.mktemp("ranks"), free_port()
    launch = str(HERE / "launch.py")
    command = [launch, str(world), str(directory)]
    if how == "torchrun":
        command = ["-m", "torch.distributed.run", f"--nproc_per_node={world}", f"--master_port={port}"]
        command += [launch, str(directory)]
    environment = {**os.environ, "PYTHONPATH": PATH_WITH_TESTS, "TEST_PORT": port, "OMP_NUM_THREADS": "1"}
    environment["TEST_STEPS"] = str(steps)
    environment["TMPDIR"] = str(tmp_path_factory.mktemp("checkpoints"))
    run = run_python(command, env=environment, timeout=600)
    found: dict[str, dict[int, str]] = {}
    for rank in range(world):
        path = directory / f"{rank}.json"
        assert path.exists(), f"rank {rank} did not finish:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        for name, text in json.loads(path.read_text()).items():
            found.setdefault(name, {})[rank] = text
    assert (run.returncode != 0) is bool(found), run.stderr[-4000:]
    return found


def test_a_rank_that_dies_is_told_of(tmp_path):
    command = [HERE / "launch.py", "1", tmp_path / "not" / "there"]
    environment = {**os.environ, "PYTHONPATH": PATH_WITH_TESTS, "TEST_PORT": "no port"}
    run = run_python(command, env=environment)
    assert run.returncode == 1
    assert "Traceback" in run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(failures, name):
    assert not failures.get(name), "\n".join(failures[name].values())
