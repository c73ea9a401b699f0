"""A script that ends with a process group up, as nearly all of apex's did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading, time
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ended = threading.Event()
def gloo():
    ended.wait()
    time.sleep(0.01)
    print("dropped its last tensor", flush=True)
threading.Thread(target=gloo, daemon=True).start()
ended.set()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("sys.exit(3)", 3), ("raise ValueError", 1)])],
)
def test_threads_of_gloo_get_the_interpreter_once_more(tmp_path, end, status):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    command = [sys.executable, "-m", "ampcompat", "run", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "dropped its last tensor\n"), done.stderr
