"""Scripts in the manner of well-known apex users train unedited under ``ampcompat run`` at every level."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
LEVELS = ("O0", "O1", "O2", "O3")

# One process runs a script at all levels: importing torch costs more than the training.
DRIVER = """
import os, sys, torch
torch.set_num_threads(1)
from ampcompat._state import state
from ampcompat.cli import main
script, *levels = sys.argv[1:]
for level in levels:
    print("==", level, flush=True)
    assert main(["run", "--opt-level", level, script]) == 0
    state.reset()
"""


def run(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(lines):
    return [json.loads(line)["loss"] for line in lines if line.startswith("{")]


def assert_falls(seen, steps):
    assert len(seen) >= steps
    assert sum(seen[-5:]) < 0.9 * sum(seen[:5])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_trains_at_every_level(script):
    out = run([sys.executable, "-c", DRIVER, str(script), *LEVELS])
    by_level = {part[:2]: part.splitlines() for part in out.split("== ")[1:]}
    assert set(by_level) == set(LEVELS)
    for lines in by_level.values():
        assert_falls(losses(lines), steps=20)
    # The scripts fall back to float32 in silence when the import fails: that amp was in force has to be seen.
    # O1 and O2 round the same weights: where nothing but convolutions and batch norms is in the net they agree bitwise.
    seen = {level: losses(lines) for level, lines in by_level.items()}
    assert seen["O0"] not in (seen["O1"], seen["O2"], seen["O3"])
    assert seen["O2"] != seen["O3"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_trains_under_torchrun(script):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    out = run([*launcher, "-m", "ampcompat", "run", "--opt-level", "O1", str(script)])
    assert_falls(losses(out.splitlines()), steps=20)
