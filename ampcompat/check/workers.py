"""Processes for many files: parsing is bound to one core, and files do not need each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
#: Below this many files a process costs more to start than it saves.
FEW = 64
MOST = 8


@contextlib.contextmanager
def workers(
    jobs: int, few: int | None = None
) -> Iterator[Callable[[Callable[[Job], Result], Sequence[Job]], Iterable[Result]]]:
    """A ``map`` that keeps the order: over processes where there are many jobs and cores, else in this one."""
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST)
    # A process that has threads (torch) must not be forked; spawned ones import what they need, which is little.
    if jobs < (FEW if few is None else few) or cores < 2 or multiprocessing.parent_process() is not None:
        yield lambda function, given: map(function, given)
        return
    kind = "fork" if "torch" not in sys.modules and "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(kind).Pool(cores) as pool:
        yield lambda function, given: pool.imap(function, given, chunksize=max(1, min(64, len(given) // (4 * cores))))
