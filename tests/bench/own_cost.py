"""What a step costs beside the model: nothing is computed, gradients are set by hand, the optimizer does nothing."""

import random
import time

import torch

from ampcompat import amp
from ampcompat._state import state

from .counting import counted
from .workers import Ratio

SIZES = (10, 100, 1000, 10_000)


class Idle(torch.optim.Optimizer):
    """Holds parameters and does not step them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        return None


class Tensors(torch.nn.Module):
    """Holds ``count`` parameters of four elements."""

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


def grad_scaler(count, device):
    """``scale``, ``unscale_``, ``step`` and ``update`` of a GradScaler."""
    model = Tensors(count).to(device)
    optimizer, scaler = Idle(model.parameters()), torch.amp.GradScaler(device)
    pairs, loss = _gradients(model), torch.ones((), device=device)

    def step():
        scaler.scale(loss)
        _set(pairs)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def masters(count, device):
    """The same with half weights and float32 masters, written by hand."""
    model = Tensors(count).to(device).half()
    halves = list(model.parameters())
    wide = [torch.nn.Parameter(p.detach().float()) for p in halves]
    optimizer, scaler = Idle(wide), torch.amp.GradScaler(device)
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


def under_amp(level, count, device):
    """``scale_loss`` and ``step`` of ampcompat."""
    model = Tensors(count).to(device)
    model, optimizer = amp.initialize(model, Idle(model.parameters()), opt_level=level, verbosity=0)
    pairs, loss = _gradients(model), torch.ones((), device=device)

    def step():
        with amp.scale_loss(loss, optimizer):
            _set(pairs)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(count, device):
    """What all of them do: set gradients and clear them."""
    model = Tensors(count).to(device)
    optimizer, pairs = Idle(model.parameters()), _gradients(model)

    def step():
        _set(pairs)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(device="cpu", quick=False):
    """Rows: size, microseconds of each variant beyond ``bare`` (best turn), ratios, dispatcher calls."""
    rows = []
    for size in SIZES:
        state.reset()
        steps = {
            "bare": bare(size, device),
            "GradScaler": grad_scaler(size, device),
            "O1": under_amp("O1", size, device),
            "hand-written masters": masters(size, device),
            "O2": under_amp("O2", size, device),
        }
        for step in steps.values():
            for _ in range(6):
                step()
        turns, calls = (12 if quick else 40), max(2, 1000 // size)
        times = {name: [] for name in steps}
        for _ in range(turns):
            for name in random.sample(list(steps), len(steps)):
                for _ in range(max(1, calls // 4)):  # the others have emptied the caches
                    steps[name]()
                start = time.perf_counter()
                for _ in range(calls):
                    steps[name]()
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) / calls)
        floor = min(times.pop("bare"))
        own = {name: [max(t - floor, 1e-9) for t in values] for name, values in times.items()}
        best = {name: min(values) for name, values in own.items()}
        rows.append(
            {
                "size": size,
                "microseconds": {name: value * 1e6 for name, value in best.items()},
                "O1 / GradScaler": (best["O1"] / best["GradScaler"], Ratio.of(own["O1"], own["GradScaler"])),
                "O2 / hand-written masters": (
                    best["O2"] / best["hand-written masters"],
                    Ratio.of(own["O2"], own["hand-written masters"]),
                ),
                "ops": {name: counted(step)["ops"] for name, step in steps.items()} if size <= 1000 else {},
            }
        )
    state.reset()
    return rows
