"""Processes that share torch's on-disk compile cache, with and without the rules, each compute what they should."""

import pytest
from python_process import run_python

pytestmark = pytest.mark.torch

#: Prints the dtype of a compiled loss, and how often its graph was found in the cache.
PROGRAM = """
import sys
import torch
from torch._dynamo.utils import counters

if sys.argv[1] == "rules":
    from ampcompat.amp.casts import installation
    installation.install(["cpu"])

@torch.compile(fullgraph=True)
def loss(x):
    return torch.cosh(x).sum()

with torch.autocast("cpu", dtype=torch.float16):
    print(loss(torch.ones(8).half()).dtype, counters["aot_autograd"]["autograd_cache_hit"])
"""
DTYPE = {"plain": "torch.float16", "rules": "torch.float32"}


def hits(kind, directory):
    """How often a process with the rules, or a plain one, found its graph in the cache of ``directory``."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory)}
    done = run_python(["-W", "ignore", "-c", PROGRAM, kind], variables=cache, fresh=True)
    assert done.returncode == 0, done.stderr
    dtype, found = done.stdout.split()
    assert dtype == DTYPE[kind]
    return int(found)


@pytest.mark.slow
@pytest.mark.parametrize("order", [("plain", "rules"), ("rules", "plain")])
def test_a_warm_cache_of_the_other_kind_is_not_used(order, tmp_path):
    first, second = order
    hits(first, tmp_path)
    assert hits(second, tmp_path) == 0
