"""Bytes per parameter, and what happens once: import, ``initialize``, ``state_dict``."""

import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from ampcompat import amp
from tests.counting import peak_bytes
from tests.internals import reset

from . import optimizers, report
from .loops import OPTIMIZERS
from .report import Section
from .workers import KEEP_MEMORY

LAYERS, WIDTH = 12, 512
WIDTHS = {"3 million parameters": 512, "13 million parameters": 1024}


def _model(width):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))


def bytes_per_parameter(make_optimizer, accumulated):
    """The peaks of leaving the last ``scale_loss`` block at O2 and of the optimizer's own step, in bytes per parameter.

    Counted with what is held anyway: half weights (2), masters (4) and Adam's moments (8).
    """
    reset()
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = amp.initialize(model, make_optimizer(model.parameters()), opt_level="O2", verbosity=0)
    x = torch.randn(4, WIDTH)
    count = sum(p.numel() for p in model.parameters())

    def step():
        for last in [False, True][1 - accumulated :]:
            loss = model(x).float().square().mean()
            manager = amp.scale_loss(loss, optimizer)
            manager.__enter__().backward()
            with torch.profiler.record_function("leaving the block" if last else "earlier block"):
                manager.__exit__(None, None, None)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):  # the first steps compare masters by value
        step()
    held = 14
    own_step = f"Optimizer.step#{type(optimizer).__name__}.step"  # torch's own name of the region
    peaks = peak_bytes(step, {"leaving the block", own_step})
    reset()
    return {
        "leaving the block": held + peaks["leaving the block"] / count,
        "optimizer": held + peaks[own_step] / count,
    }


def _best(call, times):
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def import_seconds(times):
    """Best seconds of ``import torch``, and of it and ``ampcompat.amp``, in fresh processes that take turns.

    Both are compiled to bytecode, as pip leaves them; from an edited tree the first process does that.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    found = {"import torch": [], "import torch; from ampcompat import amp": []}
    for _ in range(times):
        for statement, values in found.items():
            code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
            command = [sys.executable, "-c", code]
            printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            values.append(float(printed))
    return {statement: min(values) for statement, values in found.items()}


def initialize_ratio(times, width):
    """Seconds of ``initialize`` at O2 with an optimizer, and of casting by hand what it casts, once.

    By hand: a float32 clone of every parameter (the masters, values taken before the cast) and ``model.half()``. Making
    the model, its copy and the optimizer is in neither. Medians of six processes' medians (best turns of the same code
    differ by 4 % there, medians by 1 %), in which memory that was freed is kept and not given back to the system: else
    what a turn costs is mostly page faults, by what the turn before it left.
    """
    code = f"from tests.bench import footprint; print(*footprint.initialize_turns({times}, {width}))"
    root, pairs = Path(__file__).parents[2], []
    for _ in range(6):
        command = [sys.executable, "-c", code]
        found = subprocess.run(
            command, cwd=root, env={**os.environ, **KEEP_MEMORY}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        pairs.append(map(float, found.split()))
    return tuple(map(statistics.median, zip(*pairs, strict=True)))


def initialize_turns(times, width):
    """Median seconds of ``initialize``, and by hand, in this process, turn and turn about."""
    torch.set_num_threads(1)
    plain = _model(width)
    found = [], []
    for turn in range(4 * times):
        side = (turn + turn // 2) % 2  # who goes first changes, too
        reset()
        gc.collect()  # what a turn leaves in cycles would otherwise be freed in some later turn, of the other side
        if turn == 2:  # both sides ran, and imported what they need
            gc.freeze()  # from here on collecting does not look at all of torch
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = time.process_time()
        made = (_initialize, _by_hand)[side](model, optimizer)
        found[side].append(time.process_time() - start)
        del model, optimizer, made
    reset()
    return list(map(statistics.median, found))


def _by_hand(model, optimizer):
    masters = [p.detach().clone() for p in model.parameters()]
    model.half()
    return masters


def _initialize(model, optimizer):
    return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def state_dict_ratio(times):
    """Best seconds of ``state_dict()`` at O2 after a step, over plain torch's plus one copy of the values."""
    reset()
    plain = _model(WIDTH)
    model = copy.deepcopy(plain)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    x = torch.randn(8, WIDTH)
    mine, theirs = [], []
    for turn in range(times + 4):
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn >= 4:
            mine.append(_best(model.state_dict, 1))
            theirs.append(_best(lambda: {k: v.clone() for k, v in plain.state_dict().items()}, 1))
    reset()
    return min(mine), min(theirs)


def section(device, quick):
    """The section on memory and on what happens once; measured on the CPU, FusedAdam on ``device``."""
    memory = []
    for name in ("AdamW(fused)", "AdamW"):
        for accumulated in (False, True):
            found = bytes_per_parameter(OPTIMIZERS[name], accumulated)
            memory.append([name, accumulated, *(f"{value:.2f}" for value in found.values())])
            report.progress(f"memory: {memory[-1]}")
    torch_alone, both = import_seconds(3 if quick else 15).values()
    initialize = {size: initialize_ratio(5 if quick else 20, width) for size, width in WIDTHS.items()}
    saved = state_dict_ratio(5 if quick else 20)
    fused = optimizers.fused_adam_ratio(10 if quick else 30, device)
    summary = [
        ["O2 with AdamW(fused), bytes per parameter, optimizer's peak", *report.verdict(float(memory[0][3]), 20.0)],
        ["import torch and ampcompat.amp / import torch", *report.verdict(both / torch_alone, 1.05)],
        ["FusedAdam at O2 / AdamW(fused) and copies by hand", *report.verdict(fused.median, 1.0)],
        *(
            [f"initialize at O2 / masters cloned and the model cast by hand, {size}", *report.verdict(ours / hand, 1.5)]
            for size, (ours, hand) in initialize.items()
        ),
        ["state_dict at O2 / plain torch's plus one copy", *report.verdict(saved[0] / saved[1], 1.0)],
    ]
    text = (
        "## Memory at O2\n\nPeak bytes per parameter: 2 half weights, 4 masters, 8 moments, 4 master gradients, and 2"
        " half gradients until the step.\n\n"
    )
    heads = ["optimizer", "accumulated", "leaving the block", "optimizer"]
    return Section(text + report.table(heads, memory), summary)
