"""One process per variant, taking turns: the casts of one do not reach another, and noise reaches all alike."""

import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import traceback
from dataclasses import dataclass
from functools import partial

import torch

from tests import counting
from tests.internals import reset

from . import hardware, loops, models

TURN = 0.02  # seconds of work per turn
#: Of a process of the original: folders with it and with its compiled extension, separated as in ``PATH``.
ORIGINAL = "BENCH_ORIGINAL"
#: glibc keeps what is freed, as torch's allocator does on a GPU. Else a third of a step may be page faults, more in one
#: process and less in the next, by what it happened to allocate before.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}


@contextlib.contextmanager
def allocator(keeps):
    """Processes started inside have glibc keep what is freed, or have it as users have it."""
    before = {name: os.environ.pop(name, None) for name in KEEP_MEMORY}
    os.environ.update(KEEP_MEMORY if keeps else {})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@dataclass
class Ratio:
    """Median and quartiles of the ratios of one variant to another, turn by turn."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours, theirs):
        values = [a / b for a, b in zip(ours, theirs, strict=True)]
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def seconds(call, times, device):
    """Seconds per call of ``times`` calls."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / times
    now = hardware.clock(device)
    start = now()
    for _ in range(times):
        call()
    return (now() - start) / times


def _make_step(variant, case):
    return loops.make_step(variant, case, *models.make(case.model, case.device))


def serve(pipe, variant):
    """A worker: builds the cases it is sent, and makes steps when asked."""
    torch.set_num_threads(1)
    if variant.startswith("apex "):
        sys.path[:0] = os.environ[ORIGINAL].split(os.pathsep)
    step = case = make = None
    while True:
        what, given = pipe.recv()
        try:
            if what == "stop":
                return
            if what == "case":
                reset()
                case = given
                make = partial(_make_step, variant, case)
                step = make()
                for _ in range(4):  # masters are compared by value in their first steps
                    step()
                once = min(seconds(step, 1, case.device) for _ in range(3))
                pipe.send(once)
            elif what == "turn":
                seconds(step, max(1, given // 4), case.device)  # the others have emptied the caches
                pipe.send(seconds(step, given, case.device))
            elif what == "count":
                if case.device == "cuda":
                    pipe.send(counting.counted_on_cuda(step))
                else:
                    found = counting.counted(step)
                    if given:
                        found["page faults"] = counting.page_faults(step)
                        step = reset()
                        found["peak bytes"] = counting.peak_of_a_step(make)
                    pipe.send(found)
        except Exception:
            pipe.send(traceback.format_exc(limit=-3))


class Workers:
    """The processes; use as a context. ``keeps``: glibc keeps what is freed in them."""

    def __init__(self, variants, keeps=True):
        self.variants, self.keeps = variants, keeps

    def __enter__(self):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = {}, []
        for variant in self.variants:
            self.pipes[variant], end = context.Pipe()
            process = context.Process(target=serve, args=(end, variant), daemon=True)
            with allocator(self.keeps):
                process.start()
            self.processes.append(process)
        return self

    def __exit__(self, *exc):
        for pipe in self.pipes.values():
            pipe.send(("stop", None))
        for process in self.processes:
            process.join(10)

    def _ask(self, variant, what, given=None):
        return self._ask_all([variant], what, given)[variant]

    def _ask_all(self, variants, what, given=None):
        """Each variant's answer; they work at the same time."""
        for variant in variants:
            self.pipes[variant].send((what, given))
        return {variant: self.pipes[variant].recv() for variant in variants}

    def measure(self, case, turns, count=True, peaks=False):
        """Seconds per step, turn by turn, and counts, by variant; a variant that cannot run the case has its error.

        ``peaks``: on a CPU, count the most bytes held, too, which takes as long as eight slow steps.
        """
        times, counts, steps = {}, {}, {}
        for variant, once in self._ask_all(self.variants, "case", case).items():
            if isinstance(once, str):
                counts[variant] = {"error": once.strip().splitlines()[-1]}
                continue
            steps[variant], times[variant] = max(1, min(200, int(TURN / once))), []
        for turn in range(turns):
            for variant in random.sample(list(steps), len(steps)):
                times[variant].append(self._ask(variant, "turn", steps[variant]))
        for variant in steps if count else ():
            counts[variant] = self._ask(variant, "count", peaks)
        return times, counts
