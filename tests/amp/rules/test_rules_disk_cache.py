"""Processes that share torch's on-disk compile cache, with and without the rules, each compute what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("cached_program.py")
DTYPE = {"plain": "torch.float16", "rules": "torch.float32"}


def run(kind, directory):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), kind],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory), "PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    dtype, hits = done.stdout.split()
    assert dtype == DTYPE[kind]
    return int(hits)


@pytest.mark.slow
@pytest.mark.parametrize("order", [("plain", "rules"), ("rules", "plain")])
def test_a_warm_cache_of_the_other_kind_is_not_used(order, tmp_path):
    first, second = order
    run(first, tmp_path)
    assert run(second, tmp_path) == 0
