"""Several processes over gloo: ``all_checks.py`` on two ranks, at two levels; slowly at all, on four, by torchrun."""

import functools
import json
from pathlib import Path

import pytest
from all_checks import AT_EVERY_LEVEL, AT_TWO_LEVELS
from process_group import free_port
from python_process import run_python

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent


#: Ranks, how they are started, the steps of runs that are compared, and the levels. The first is not slow.
LAUNCHES = {
    "2 ranks, two levels": (2, "fork", 20, "two"),
    "2 ranks": (2, "fork", 20, "every"),
    "2 ranks by torchrun": (2, "torchrun", 200, "every"),
    "4 ranks": (4, "fork", 200, "every"),
}


def checks_of_launches():
    """Each launch with each check at each level that it has there."""
    for launch, (_, _, _, which) in LAUNCHES.items():
        marks = [pytest.mark.slow] if which == "every" else []
        for check, levels in AT_TWO_LEVELS if which == "two" else AT_EVERY_LEVEL:
            for level in levels:
                name = f"{check.__name__}-{level}"
                yield pytest.param(launch, name, id=f"{launch}-{name}", marks=marks)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What failed in a launch, by check and rank: each launch serves many tests."""

    @functools.cache
    def of_launch(name):
        world, how, steps, levels = LAUNCHES[name]
        directory, port = tmp_path_factory.mktemp("ranks"), free_port()
        launch = str(HERE / "launch.py")
        command = [launch, str(world), str(directory)]
        if how == "torchrun":
            command = ["-m", "torch.distributed.run", f"--nproc_per_node={world}", f"--master_port={port}"]
            command += [launch, str(directory)]
        variables = {"TEST_PORT": str(port), "TEST_STEPS": str(steps), "TEST_LEVELS": levels}
        variables["TMPDIR"] = str(tmp_path_factory.mktemp("checkpoints"))
        run = run_python(command, variables=variables, fresh=how == "torchrun")
        found: dict[str, dict[int, str]] = {}
        for rank in range(world):
            path = directory / f"{rank}.json"
            assert path.exists(), f"rank {rank} did not finish:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
            for check, text in json.loads(path.read_text()).items():
                found.setdefault(check, {})[rank] = text
        assert (run.returncode != 0) is bool(found), run.stderr[-4000:]
        return found

    return of_launch


def test_a_rank_that_dies_is_told_of(tmp_path):
    command = [HERE / "launch.py", "1", tmp_path / "not" / "there"]
    run = run_python(command, variables={"TEST_PORT": "no port"})
    assert run.returncode == 1
    assert "Traceback" in run.stderr


@pytest.mark.parametrize(("launch", "check"), [*checks_of_launches()])
def test_on_every_rank(failures, launch, check):
    failed = failures(launch).get(check)
    assert not failed, "\n".join(failed.values())
