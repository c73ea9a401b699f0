"""Processes that a script starts see the alias too, and the runner's settings."""

import sys

import pytest
from python_process import run_python

import ampcompat
from ampcompat._distribution import SHIM
from ampcompat.cli import run

# It says "from apex import" at its top, so that a child that lacks the alias fails on import.
SPAWNS = """
import importlib.metadata, importlib.util, json, os, subprocess, sys
import amp_C, apex_C, fused_adam_cuda, fused_layer_norm_cuda
assert importlib.util.find_spec("apex") and importlib.metadata.version("apex")
import apex.amp._amp_state
from apex import amp
import torch, ampcompat

torch.matmul = torch.matmul  # a script that patches torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        assert amp is ampcompat.amp and apex is ampcompat and not hasattr(amp._amp_state, "__file__")
        return index, os.environ["AMPCOMPAT_OPT_LEVEL"] + os.environ["AMPCOMPAT_DTYPE"]

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([(int(i), level[0]) for i, level in loader])
    code = "import fused_adam_cuda, fused_layer_norm_cuda as norm, apex_C, apex.amp, importlib.metadata as m;"
    code += "print(apex.__name__, m.version('apex'), apex_C.__name__, fused_adam_cuda.__name__, norm.__name__)"
    print(subprocess.run([os.environ["PYTHON"], "-c", code], capture_output=True, text=True, check=True).stdout.strip())
"""


def test_children_see_the_alias(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    command = ["-m", "ampcompat", "run", "--opt-level", "O2", "--dtype=bf16", "spawns.py"]
    done = run_python(command, cwd=tmp_path, variables={"PYTHON": sys.executable}, fresh=True)
    assert done.stderr.startswith("ampcompat run: the script never called amp.initialize in this process")
    assert done.stderr.endswith(" - processes that it started inherited --opt-level, --dtype\n")
    assert done.stdout.splitlines() == [
        "[(0, 'O2bfloat16'), (1, 'O2bfloat16')]",
        f"ampcompat {ampcompat.__version__} ampcompat.apex_C ampcompat.fused_adam_cuda ampcompat.fused_layer_norm_cuda",
    ]


def test_the_shim_carries_the_version():
    assert f"Version: {ampcompat.__version__}\n" in (SHIM / "apex.dist-info" / "METADATA").read_text()


@pytest.mark.parametrize(
    ("line", "ours", "target"),
    [
        ("run a.py --opt-level O1", "run", "a.py --opt-level O1"),
        ("run --opt-level O2 --dtype bf16 a.py -- -x", "run --opt-level O2 --dtype bf16", "a.py -- -x"),
        ("run --dtype=bf16 -m pkg.mod --help", "run --dtype=bf16", "-m pkg.mod --help"),
        ("run -- a.py", "run", "a.py"),
        ("run --help", "run --help", ""),
        ("run --opt-level", "run --opt-level", ""),
        ("run", "run", ""),
    ],
)
def test_where_the_line_is_split(line, ours, target):
    assert run.split(line.split()) == (ours.split(), target.split())
