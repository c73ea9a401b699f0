"""A step of two processes under DDP on gloo: what amp adds to native autocast and to masters written by hand."""

import multiprocessing
import os
import random
import socket

import torch
import torch.distributed as dist

from . import report
from .loops import Case
from .report import Section
from .steps import Pair
from .workers import TURN, Ratio, Workers, allocator, serve

RANKS = 2
PAIRS = (
    Pair("O1", "native, same casts"),
    Pair("O1", "native"),
    Pair("O2", "hand-written masters"),
    Pair("O2", "hand-written, float32 sums"),
)
CASES = (
    Case("MLP", torch.bfloat16, data_parallel=True),
    Case("MLP", torch.float16, data_parallel=True),
    Case("transformer", torch.float16, "SGD", data_parallel=True),
)


def _serve_rank(pipe, variant, rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo")
    serve(pipe, variant)
    os._exit(0)  # torch may hang or abort when it takes gloo down


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Groups(Workers):
    """For each variant a process group of its own, of :data:`RANKS` workers."""

    def __enter__(self):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = {}, []
        for variant in self.variants:
            port = _free_port()
            for rank in range(RANKS):
                self.pipes[variant, rank], end = context.Pipe()
                process = context.Process(target=_serve_rank, args=(end, variant, rank, port), daemon=True)
                with allocator(self.keeps):
                    process.start()
                self.processes.append(process)
        return self

    def _ask_group(self, variant, what, given):
        """What the ranks of ``variant`` took together: seconds of processor time."""
        answers = self._ask_all([(variant, rank) for rank in range(RANKS)], what, given).values()
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            raise RuntimeError(errors[0])
        return sum(answers)

    def measure(self, case, turns):
        """Seconds per step of both ranks together, turn by turn, by variant."""
        steps = {}
        for variant in self.variants:
            once = self._ask_group(variant, "case", case)
            steps[variant] = max(1, min(200, int(TURN * RANKS / once)))
        times = {variant: [] for variant in steps}
        for _ in range(turns):
            for variant in random.sample(list(steps), len(steps)):
                times[variant].append(self._ask_group(variant, "turn", steps[variant]))
        return times


def section(device, quick):
    """Ratios of steps under DDP; the ranks of all variants take turns in one run."""
    text = (
        "## Two processes under DDP\n\nTwo ranks on gloo, one thread each; processor time of both ranks; medians of"
        " ratios turn by turn, quartiles in brackets.\n\n"
    )
    if device != "cpu":
        return Section(text + "On a CPU alone: nothing measured.\n")
    variants = list(dict.fromkeys(name for pair in PAIRS for name in (pair.theirs, pair.ours)))
    rounds, turns = (1, 8) if quick else (3, 12)
    rows, medians = [], {pair: [] for pair in PAIRS}
    found = {case: {variant: [] for variant in variants} for case in CASES}
    for _ in range(rounds):  # each process has its luck
        with Groups(variants) as groups:
            for case in CASES:
                for variant, times in groups.measure(case, turns).items():
                    found[case][variant] += times
                report.progress(case.title)
    for case, times in found.items():
        ratios = {pair: Ratio.of(times[pair.ours], times[pair.theirs]) for pair in PAIRS}
        rows.append([case.title, f"{1e3 * min(times['native']):.2f}", *ratios.values()])
        for pair, ratio in ratios.items():
            medians[pair].append(ratio.median)
    means = {pair: report.geometric_mean(values) for pair, values in medians.items()}
    rows.append(["geometric mean", "", *(f"**{mean:.3f}**" for mean in means.values())])
    heads = ["case", "native, ms (best)", *(pair.title for pair in PAIRS)]
    summary = [[f"two processes: {pair.title}, geometric mean", f"{mean:.3f}", "", ""] for pair, mean in means.items()]
    return Section(text + report.table(heads, rows), summary)
