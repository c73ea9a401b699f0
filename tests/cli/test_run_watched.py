"""``ampcompat run --explain``, ``--receipt`` and ``--keep-fp32``."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from python_process import run_python

ROOT = Path(__file__).parents[2]
#: A module that the scripts below import.
TRAINING = """
import torch

def train(steps, value=1.0):
    from apex import amp
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for _ in range(steps):
        with amp.scale_loss(model(torch.full((8, 8), value)).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
"""
SCRIPT = """
import sys, torch
from apex import amp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for x in (torch.ones(2, 8), torch.full((2, 8), 1e6)):
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def ampcompat_run(tmp_path):
    """Run ``ampcompat run`` with the given words, in ``tmp_path``."""

    def start(*words, **environment):
        (tmp_path / "training.py").write_text(TRAINING)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        return run_python(["-m", "ampcompat", "run", *words], cwd=tmp_path, env=environment)

    return start


@pytest.fixture
def run(tmp_path, ampcompat_run):
    def start(*options, status=0):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        return ampcompat_run(*options, script, status)

    return start


def test_all_options_at_once(tmp_path, run):
    """The exit status is that of the script."""
    done = run("--explain", "--receipt=r.html", "--keep-fp32", "1", status=3)
    assert done.returncode == 3, done.stderr
    assert "AMPCOMPAT_KEEP_FP32: '1' keeps 1 in float32." in done.stdout
    assert "the cast to float16" in done.stderr
    assert "wrote the precision receipt to r.html" in done.stdout
    assert "1 of 2 optimizer steps were skipped" in (tmp_path / "r.html").read_text()


def test_a_receipt_that_fails_does_not_take_the_scripts_place(tmp_path, run):
    (tmp_path / "r.html").mkdir()
    done = run("--receipt=r.html", status=3)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("ampcompat run: no receipt: ")


SPAWNS = """
import os, subprocess, sys
import torch.multiprocessing as mp
from training import train

def overflow(rank):
    train(1, 1e6)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        overflow(0)
    elif sys.argv[1] == "subprocess":
        subprocess.run([os.environ["PYTHON"], __file__, "child"], check=True)
    elif sys.argv[1] == "spawn":
        mp.spawn(overflow, nprocs=1)
    elif sys.argv[1] == "fork":
        mp.start_processes(overflow, nprocs=1, start_method="fork")
    elif os.fork() == 0:
        sys.exit()
    else:
        os.wait()
"""


@pytest.fixture
def watch_children(tmp_path, ampcompat_run):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    return lambda how: ampcompat_run("--explain", "--receipt", "spawns.py", how, PYTHON=sys.executable)


@pytest.mark.parametrize(
    "how", ["subprocess", *(pytest.param(how, marks=pytest.mark.slow) for how in ("spawn", "fork"))]
)
def test_child_processes_explain_and_are_recorded(watch_children, how):
    """Processes that the script starts print their explanations and are in the receipt."""
    done = watch_children(how)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ampcompat explain: A step was skipped.") == 1
    assert "left the range of float16" in done.stderr
    assert done.stdout.count("precision receipt: opt_level O1") == 1
    assert "1 of 1 optimizer steps were skipped" in done.stdout


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_are_added_up_and_one_that_was_killed_is_named(how, tmp_path, ampcompat_run):
    (tmp_path / "ranks.py").write_text(RANKS)
    done = ampcompat_run("--receipt=r.json", "ranks.py", how)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "r.json").read_text())
    assert [row["rank"] for row in facts["processes"]] == [0, 1, 2]
    assert [row["steps"] for row in facts["processes"]][:2] == [4, 4]
    assert facts["flops"]["forward"] == {"float16": 2 * 3 * (2 * 8 * 8 * 8)}
    assert "(rank 2) is missing: it called amp.initialize, and was killed," in facts["sentences"][-1]
    assert facts["script"] == "ranks.py"
    assert facts["arguments"] == [how]


RANKS = """
import os, sys
import torch.multiprocessing as mp
from training import train

def run_rank(rank):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "3"
    if rank == 2:
        train(0)
        os._exit(0)
    train(4)

if __name__ == "__main__":
    mp.start_processes(run_rank, nprocs=3, start_method=sys.argv[1])
"""


SIDE_BY_SIDE = """
import os, sys
from training import train
train(4 + int(os.environ["RANK"]))
if os.environ["RANK"] == "1":
    sys.exit(sys.argv[1])
"""


def test_ranks_of_a_launcher_on_one_machine_are_added_up(tmp_path, ampcompat_run):
    """Two of four: the others run on another machine."""
    (tmp_path / "ranks.py").write_text(SIDE_BY_SIDE)
    torchrun = {"MASTER_PORT": "29512", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}

    def rank(number):
        ours = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "4", "TMPDIR": str(tmp_path)}
        return ampcompat_run("--receipt=r.json", "ranks.py", "no more data", **torchrun, **ours)

    with ThreadPoolExecutor(2) as both:
        ended = list(both.map(rank, "01"))
    assert [one.returncode for one in ended] == [0, 1], ended
    assert [one.stdout for one in ended] == ["wrote the precision receipt to r.json\n", ""]
    facts = json.loads((tmp_path / "r.json").read_text())
    assert [(row["rank"], row["steps"], row["ended"]) for row in facts["processes"]] == [(0, 4, True), (1, 5, True)]
    assert facts["flops"]["forward"] == {"float16": 2 * 3 * (2 * 8 * 8 * 8)}
    assert facts["steps"] == 9
    assert any(said.startswith("2 of 4 ranks are not in this receipt") for said in facts["sentences"])
    assert not list(tmp_path.glob("ampcompat-receipt-*"))


CRASHES = """
from training import train
train(2)
raise KeyError("no such batch")
"""


def test_the_receipt_of_a_script_that_crashes_says_so(tmp_path, ampcompat_run):
    (tmp_path / "crashes.py").write_text(CRASHES)
    done = ampcompat_run("--receipt=r.json", "crashes.py", "--lr", "0.1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'no such batch'"
    facts = json.loads((tmp_path / "r.json").read_text())
    assert facts["error"] == {"type": "KeyError", "message": "'no such batch'"}
    assert facts["sentences"][0] == "The script crashed after 2 optimizer steps: KeyError: 'no such batch'"
    assert (facts["script"], facts["arguments"]) == ("crashes.py", ["--lr", "0.1"])


def explained(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_explain_as_lines_of_json_until_the_first_fault(run):
    done = run("--explain=json,first,ranges", status=3)
    assert done.returncode == 1  # the script's own 3 is never reached
    assert "ampcompat explain" not in done.stdout + done.stderr
    told = explained(done.stderr)
    assert [one["explain"] for one in told] == ["ranges", "fault", "ranges", "end"]
    fault = told[1]
    assert (fault["op"], fault["step"], fault["pass"], fault["largest"]) == ("_to_copy", 2, "forward", 1e6)
    assert {"file", "line", "source", "cures", "module", "dtype"} <= set(fault)
    rows = {(row["module"], row["pass"]): row for row in told[0]["rows"]}
    assert {key for key in rows if key[0]} == {(name, way) for name in "01" for way in ("forward", "backward")}
    assert told[0]["step"] == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_copy_of_the_script_writes_no_receipt(watch_children):
    assert watch_children("os.fork").stdout.count("precision receipt:") == 1
