"""Processes for many files: parsing is bound to one core, and files do not need each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Literal, Protocol, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
#: Below this many files a process costs more to start than it saves.
FEW = 64
MOST = 8


class Apply(Protocol):
    """A ``map`` that keeps the order."""

    def __call__(self, function: Callable[[Job], Result], given: Sequence[Job], /) -> Iterable[Result]:
        """The results of ``function`` for each of ``given``."""
        ...


def processes(jobs: int, few: int | None = None) -> tuple[int, Literal["fork", "spawn"]]:
    """How many processes are worth it for ``jobs`` files (1: this one alone), and how they are started."""
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST)
    # A process that has threads (torch) must not be forked; spawned ones import what they need, which is little.
    forks = "torch" not in sys.modules and "fork" in multiprocessing.get_all_start_methods()
    if jobs < (FEW if few is None else few) or multiprocessing.parent_process() is not None:
        cores = 1
    return cores, "fork" if forks else "spawn"


@contextlib.contextmanager
def workers(jobs: int, few: int | None = None) -> Iterator[Apply]:
    """A :class:`Apply` over processes where there are many jobs and cores, else in this one.

    Raises:
        ChildProcessError: A process was ended from outside, as the system does when it is short of memory.
    """
    count, kind = processes(jobs, few)
    if count < 2:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context(kind)) as pool:

        def apply(function: Callable[[Job], Result], given: Sequence[Job]) -> Iterable[Result]:
            return pool.map(function, given, chunksize=max(1, min(16, len(given) // (32 * count))))

        try:
            yield apply
        except BrokenProcessPool:
            ended = "a process that reads files was ended from outside - it may have had too little memory - try again"
            raise ChildProcessError(f"{ended} with fewer files, or on a machine with more memory.") from None
        finally:
            pool.shutdown(cancel_futures=True)
