"""A script that ends with a process group up, as nearly all of apex's did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import run_python

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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(["-m", "ampcompat", "run", script], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (status, "dropped its last tensor\n"), done.stderr


DESTROYS = """
import sys, threading, time
{imports}
from torch.distributed import destroy_process_group
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
started = threading.Event()
def gloo():
    started.wait()
    time.sleep(0.05)
    print("dropped its last tensor", dist.is_initialized(), flush=True)
threading.Thread(target=gloo, daemon=True).start()
started.set()
destroy_process_group()
print("destroyed", dist.is_initialized(), destroy_process_group.__module__, dist.distributed_c10d.__spec__.loader)
"""


PLAIN, WITH_APEX = "import torch.distributed as dist", "import torch, apex\ndist = torch.distributed"
SHIM = str(ROOT / "ampcompat" / "_shim")


@pytest.mark.parametrize(
    ("imports", "words", "paths"),
    [
        (PLAIN, ["-m", "ampcompat", "run"], []),
        pytest.param(WITH_APEX, ["-m", "ampcompat", "run"], [], marks=pytest.mark.slow),
        # As in the processes that a script under run starts.
        pytest.param(WITH_APEX, [], [SHIM], marks=pytest.mark.slow),
    ],
)
def test_gloo_threads_can_drop_their_last_tensor(tmp_path, imports, words, paths):
    """Gloo's threads need the interpreter to drop their last tensors: they get it before the group is destroyed."""
    script = tmp_path / "script.py"
    script.write_text(DESTROYS.format(imports=imports))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}
    command = [sys.executable, *words, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    dropped, destroyed = done.stdout.splitlines()
    assert dropped == "dropped its last tensor True", done.stderr
    assert destroyed.startswith("destroyed False torch.distributed.distributed_c10d <_frozen_importlib_external.Source")
