"""Processes for many files: parsing is bound to one core, and files do not need each other."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext

Job = TypeVar("Job")
Result = TypeVar("Result")
Settings = TypeVar("Settings")
Fact = TypeVar("Fact")
Whole = TypeVar("Whole")
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
    """A :class:`Apply` over processes where there are many jobs and cores, else in this one."""
    count, kind = processes(jobs, few)
    if count < 2:
        yield map
        return
    # Trees have no cycles: the collector would only walk them, again and again.
    with multiprocessing.get_context(kind).Pool(count, gc.disable) as pool:
        yield lambda function, given: pool.imap(function, given, chunksize=max(1, min(16, len(given) // (32 * count))))


Part = Callable[[Sequence[Job], Settings], Generator[list[Fact], Whole, list[Result]]]


def shared(
    part: Part[Job, Settings, Fact, Whole, Result],
    jobs: Sequence[Job],
    settings: Settings,
    whole: Callable[[Iterable[Fact]], Whole],
) -> list[list[Result]]:
    """Run ``part`` over shares of ``jobs`` in two steps, each share in one process from beginning to end.

    Args:
        part: Yields the facts of its share, is sent what ``whole`` makes of the facts of all, returns its results.
        jobs: What is shared out; neighbours go to different processes, since they cost alike.
        settings: Handed to each part.
        whole: Puts the facts of all parts together.
    """
    count, kind = processes(len(jobs))
    if count < 2:
        running = part(jobs, settings)
        return [_sent(running, whole(next(running)))]
    context: ForkContext | SpawnContext
    context = multiprocessing.get_context("fork") if kind == "fork" else multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        ends = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, part, jobs[number::count], settings), daemon=True)
            process.start()
            theirs.close()
            # Last in, first out: a process that is still busy when something failed is ended, then waited for.
            stack.callback(process.join)
            stack.callback(process.terminate)
            ends.append(stack.enter_context(ours))
        facts: list[Fact] = []
        for end in ends:
            facts += _received(end)
        everything = whole(facts)
        for end in ends:
            end.send(everything)
        return [_received(end) for end in ends]


def _sent(running: Generator[list[Fact], Whole, list[Result]], value: Whole) -> list[Result]:
    try:
        running.send(value)
    except StopIteration as ended:
        result: list[Result] = ended.value
        return result
    raise RuntimeError("a part yields once")


def _serve(
    end: Connection, part: Part[Job, Settings, Fact, Whole, Result], jobs: Sequence[Job], settings: Settings
) -> None:
    """In a process of its own: run one part, hand its facts and results over, or what it raised."""
    gc.disable()  # as above
    try:
        running = part(jobs, settings)
        end.send((next(running), None))
        end.send((_sent(running, end.recv()), None))
    except Exception as problem:
        end.send(([], problem))


def _received(end: Connection) -> list[Fact]:
    try:
        received: tuple[list[Fact], Exception | None] = end.recv()
    except EOFError:
        raise RuntimeError("a process that reads files was ended from outside: not enough memory?") from None
    values, problem = received
    if problem is not None:
        raise problem
    return values
