"""A program with a compiled loss: ``python cached_program.py plain|rules`` prints the dtype and the cache hits."""

import sys

import torch
from torch._dynamo.utils import counters


def loss(x):
    return torch.cosh(x).sum()


if __name__ == "__main__":
    if sys.argv[1] == "rules":
        from ampcompat.amp import rules

        rules.acquire(["cpu"])
    with torch.autocast("cpu", dtype=torch.float16):
        y = torch.compile(loss, fullgraph=True)(torch.ones(8).half())
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        sys.stdout.write(f"{y.dtype} {hits}")
