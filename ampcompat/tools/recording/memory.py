"""The largest memory that a run has needed so far."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def cuda_in_use() -> bool:
    """Whether this process has put anything on a GPU; does not initialise CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def peak_memory() -> int | None:
    """Bytes: the most that torch had allocated on the GPUs in use, else the largest resident size of the process."""
    if cuda_in_use():
        used = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        if used:
            return used
    # getrusage's figure survives an exec: it would show the parent's where that was larger.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
