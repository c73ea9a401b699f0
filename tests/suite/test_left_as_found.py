"""The fixture that all tests share: a test that leaves torch or the environment changed fails, and no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import torch
from ampcompat import _torch

def test_clean(): pass
def test_default_dtype(): torch.set_default_dtype(torch.float64)
def test_clean_after_it(): pass
def test_environment(): os.environ["LEFT_BEHIND"] = "1"
def test_clean_after_that(): pass
def test_patch(): torch.mm = lambda *args: 0
def test_autocast(): torch.set_autocast_enabled("cpu", True)
def test_clean_at_last(): pass
"""


@pytest.mark.slow
def test_what_a_test_leaves_behind_fails_it_and_no_other(tmp_path):
    (tmp_path / "test_leaves.py").write_text(TESTS)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-p", "torch_left_as_found", "-p", "no:cacheprovider", "-rE", "-q"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
    )
    blamed = [line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert blamed == ["test_default_dtype", "test_environment", "test_patch", "test_autocast"], done.stdout
    assert "8 passed, 4 errors" in done.stdout
