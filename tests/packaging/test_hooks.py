"""The hooks for pre-commit run from a checkout, by a Python that has nothing installed: no torch above all."""

import os
import re
import runpy
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^  entry: (.+)$", TEXT, re.MULTILINE)
TRAINS = "from apex import amp\nm, o = amp.initialize(DistributedDataParallel(m), o)\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The environment of a Python without packages, as ``python3``."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    environment = {**kept, "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])}
    missing = subprocess.run(["python3", "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert "No module named 'torch'" in missing.stderr
    return environment


def run(entry, files, bare, cwd):
    program, *words = entry.split()
    command = [str(ROOT / program), *words, *files]
    return subprocess.run(command, env=bare, cwd=cwd, capture_output=True, text=True)


def test_no_hook_installs_anything():
    assert set(re.findall(r"^  language: (.+)$", TEXT, re.MULTILINE)) == {"script"}
    assert "dependencies:" not in TEXT
    assert len(ENTRIES) == TEXT.count("- id:") == 2
    assert all(os.access(ROOT / entry.split()[0], os.X_OK) for entry in ENTRIES)


def test_check_runs_without_torch(bare, tmp_path):
    """It runs in one process, and in several, as it does for a large tree."""
    (tmp_path / "train.py").write_text(TRAINS)
    done = run(ENTRIES[0], ["train.py"], bare, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "wrapped_before_initialize" in done.stdout
    for number in range(80):
        (tmp_path / f"m{number}.py").write_text("x = 1\n")
    done = run(ENTRIES[0], ["."], bare, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith("81 files: 1 error")


def test_migrate_needs_no_other_package(bare, tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    done = run(ENTRIES[1], ["train.py"], bare, tmp_path)
    assert (done.returncode, done.stdout) == (0, "rewrote train.py\n")
    assert (tmp_path / "train.py").read_text() == TRAINS.replace("from apex", "from ampcompat")


def test_an_old_python_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"python3 is Python 3\.9 here - 3\.10 or newer is needed"):
        runpy.run_path(str(ROOT / ".hooks" / "ampcompat"))["main"]()
