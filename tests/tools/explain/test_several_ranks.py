"""Rank 0 tells the counts of all ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from process_group import free_port
from python_process import run_python

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, sys, time
import torch
from apex import amp
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), opt_level="O1", verbosity=0)
if "group" in sys.argv:
    torch.distributed.init_process_group("gloo")
    from apex.parallel import DistributedDataParallel as Apex
    model = Apex(model) if "apex" in sys.argv else torch.nn.parallel.DistributedDataParallel(model)
for step in range(40):
    x = torch.full((4, 8), 0.1 * step)
    if rank == 1 and step % 5 == 3:
        x[1, 2] = float("nan")
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
if "destroy" in sys.argv:
    time.sleep(0.2)  # see process_group.py
    torch.distributed.destroy_process_group()
"""


def explained(tmp_path, *arguments):
    """What each of two ranks writes, in lines of JSON."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "ampcompat", "run", "--explain=json", str(script), *arguments]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    # torch aborts a rank at its end now and then, without explain too, when all is said.
    ended_well = {0, -signal.SIGABRT} if "group" in arguments else {0}
    assert {rank.returncode for rank in ranks} <= ended_well, errors
    return [[json.loads(line) for line in error.splitlines() if line.startswith('{"explain"')] for error in errors]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.parametrize(
    "end", [["destroy"], *(pytest.param(end, marks=pytest.mark.slow) for end in ([], ["apex", "destroy"]))]
)
def test_the_counts_are_of_all_ranks(tmp_path, end):
    first, second = explained(tmp_path, "group", *end)
    verdicts = [line for line in first if line["explain"] == "verdict"]
    assert [(one["of_rank"], one["skipped"]) for one in verdicts] == [(0, 8), (1, 8)]
    assert any("train.py:16" in words for words in verdicts[1]["told"])
    assert {line["explain"] for line in second} == {"fault"}


SPAWNING = """
import os, sys
import torch
import torch.multiprocessing

def work(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv[1:] = ["group", "destroy"]
    exec(compile(SCRIPT + "\\ndel os.environ['RANK']", "train.py", "exec"), {"__name__": "train"})

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (int(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_the_counts_are_told_once_by_processes_that_forget_their_rank(tmp_path):
    """The process group is gone when they end, and no launcher has told them their ranks."""
    script = tmp_path / "spawning.py"
    script.write_text(f"SCRIPT = {SCRIPT!r}\n{SPAWNING}")
    variables = {"AMPCOMPAT_EXPLAIN": "json", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["-m", "ampcompat", "run", str(script), free_port()]
    done = run_python(command, variables=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"explain"')]
    verdicts = [one for one in lines if one["explain"] == "verdict"]
    assert [one["of_rank"] for one in verdicts] == [0, 1]


def test_where_ranks_cannot_be_asked_the_counts_are_of_this_one(tmp_path):
    """Two ranks without a process group, each with gradients of its own."""
    first, second = explained(tmp_path)
    assert [(one["of_rank"], one["skipped"]) for one in first if one["explain"] == "verdict"] == [(0, 2)]
