"""What a step costs beside the model: nothing is computed, gradients are set by hand, the optimizer does nothing."""

import random
import statistics
from contextlib import nullcontext
from functools import partial

import torch

from ampcompat import amp
from tests.counting import counted
from tests.internals import reset

from . import hardware, report
from .report import Section
from .workers import Ratio

#: What is compared.
PAIRS = (("O1", "GradScaler"), ("O2", "hand-written masters"))
#: Parameter tensors -> limits on the ratios of ``PAIRS``.
SIZES = {10: (1.1, 1.2), 100: (0.7, 1.2), 1000: (0.4, 1.2), 10_000: (None, None)}
#: Bytes that are touched before a cold call: as much as a small step of training reads.
FLUSHED = 64 << 20
HEADS = [
    "parameter tensors",
    *(f"{name}, µs" for name in ("GradScaler", "O1", "hand-written masters", "O2")),
    *(f"{ours} / {theirs}" for ours, theirs in PAIRS),
]


class Idle(torch.optim.Optimizer):
    """Holds parameters and does not step them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        return None


class Tensors(torch.nn.Module):
    """Holds ``count`` parameters."""

    def __init__(self, count):
        super().__init__()
        self.held = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4)) for _ in range(count))

    def forward(self, x):
        return x


def _gradients(model):
    return [(p, torch.ones_like(p)) for p in model.parameters()]


def _set(pairs):
    for param, grad in pairs:
        param.grad = grad


def grad_scaler(model):
    """``scale``, ``unscale_``, ``step`` and ``update`` of a GradScaler."""
    device = next(model.parameters()).device
    optimizer, scaler = Idle(model.parameters()), torch.amp.GradScaler(device.type)
    pairs, loss = _gradients(model), torch.ones((), device=device)

    def step():
        scaler.scale(loss)
        _set(pairs)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def masters(model):
    """The same with half weights and float32 masters, written by hand."""
    device = next(model.parameters()).device
    model.half()
    halves = list(model.parameters())
    wide = [torch.nn.Parameter(p.detach().float()) for p in halves]
    optimizer, scaler = Idle(wide), torch.amp.GradScaler(device.type)
    pairs, loss = _gradients(model), torch.ones((), device=device)

    def step():
        scaler.scale(loss)
        _set(pairs)
        for master, half in zip(wide, halves, strict=True):
            master.grad, half.grad = half.grad.float(), None
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, half in zip(wide, halves, strict=True):
                half.copy_(master)
        optimizer.zero_grad()

    return step


def under_amp(level, model):
    """``scale_loss`` and ``step`` of ampcompat."""
    device = next(model.parameters()).device
    model, optimizer = amp.initialize(model, Idle(model.parameters()), opt_level=level, verbosity=0)
    pairs, loss = _gradients(model), torch.ones((), device=device)

    def step():
        with amp.scale_loss(loss, optimizer):
            _set(pairs)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(model):
    """What all of them do: set gradients and clear them."""
    optimizer, pairs = Idle(model.parameters()), _gradients(model)

    def step():
        _set(pairs)
        optimizer.step()
        optimizer.zero_grad()

    return step


VARIANTS = {
    "bare": bare,
    "GradScaler": grad_scaler,
    "O1": partial(under_amp, "O1"),
    "hand-written masters": masters,
    "O2": partial(under_amp, "O2"),
}


def timed(call, calls, device):
    """Seconds per call of ``calls`` calls."""
    now = hardware.clock(device)
    start = now()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (now() - start) / calls


def measure(size, calls, turns, device, flush=None):
    """Seconds beyond ``bare`` by variant, turn by turn, and dispatcher calls by variant.

    Each of ``PAIRS`` by itself: a program has one optimizer under amp. ``flush`` is called before each turn; without it
    a turn warms up. Only the variant under amp runs with its ambient casts.
    """
    own, ops = {}, {}
    for pair in PAIRS:
        reset()
        steps = {name: VARIANTS[name](Tensors(size).to(device)) for name in ("bare", *pair)}
        times = {name: [] for name in steps}
        for step in steps.values():
            for _ in range(8):  # the first steps compare masters by value
                step()
        for _ in range(turns):
            for name in random.sample(list(steps), len(steps)):
                with nullcontext() if name == pair[0] else amp.disable_casts():
                    if flush is None:  # the others have emptied the caches
                        timed(steps[name], max(1, calls // 4), device)
                    else:
                        flush()
                    times[name].append(timed(steps[name], calls, device))
        floor = min(times["bare"])
        own |= {name: [max(t - floor, 1e-9) for t in times[name]] for name in pair}
        ops |= {name: counted(step)["ops"] for name, step in steps.items()} if size <= 1000 else {}
    reset()
    return {name: own[name] for name in VARIANTS if name in own}, [ops.get(name) for name in VARIANTS]


def warm(device, quick):
    """The section on the cost beside the model: the same calls in a loop."""
    rows, ops, summary = [], [], []
    for size, limits in SIZES.items():
        own, calls = measure(size, max(2, 1000 // size), 12 if quick else 40, device)
        best = {name: min(values) for name, values in own.items()}
        rows.append([size, *(f"{1e6 * value:.0f}" for value in best.values())])
        for (ours, theirs), limit in zip(PAIRS, limits, strict=True):
            rows[-1].append(f"{best[ours] / best[theirs]:.2f}; {Ratio.of(own[ours], own[theirs])}")
            if limit:
                title = f"own cost, {size} tensors: {ours} / {theirs}"
                summary.append([title, *report.verdict(best[ours] / best[theirs], limit)])
        if size <= 1000:
            ops.append([size, *calls])
        report.progress(f"own cost, {size} tensors: {rows[-1][-2:]}")
    text = (
        "## The cost of a step beside the model\n\nMicroseconds beyond setting and clearing the gradients: best turns;"
        " ratios of the best turns, then medians of ratios and quartiles. One optimizer under amp at a time, as in a"
        " program.\n\n"
    )
    text += report.table(HEADS, rows)
    return Section(text + "\nDispatcher calls:\n\n" + report.table(["parameter tensors", *VARIANTS], ops), summary)


def cold(device, quick):
    """The section on the same cost as a real step pays it: between two calls, 64 MiB of other data were touched."""
    others, rows = torch.zeros(FLUSHED // 4), []
    for size in (10, 100, 1000):
        own, _ = measure(size, 1, 12 if quick else 60, device, flush=lambda: others.add_(1))
        best = {name: min(values) for name, values in own.items()}
        middle = {name: statistics.median(values) for name, values in own.items()}
        rows.append([size, *(f"{1e6 * best[name]:.0f}; {1e6 * value:.0f}" for name, value in middle.items())])
        rows[-1] += [f"{best[a] / best[b]:.2f}; {middle[a] / middle[b]:.2f}" for a, b in PAIRS]
        report.progress(f"own cost, cold, {size} tensors: {rows[-1]}")
    text = (
        f"## The same with cold caches\n\nOne call at a time, after {FLUSHED >> 20} MiB of other data were touched, as"
        " between two steps of a model. Microseconds beyond setting and clearing the gradients, and ratios: best turn;"
        " median.\n\n"
    )
    return Section(text + report.table(HEADS, rows))
