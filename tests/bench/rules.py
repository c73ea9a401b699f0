"""What a rule costs per op beside native autocast, and half convolutions on the CPU beside float32's."""

import statistics
import time

import torch
import torch.nn.functional as F

from ampcompat import amp
from tests.internals import reset

from . import report
from .report import Section
from .workers import Ratio


def _ops():
    x, half = torch.randn(4, 4), torch.randn(4, 4).half()
    return {
        "half (native rule): mm": lambda: torch.mm(x, x),
        "half (our rule): prelu": lambda: F.prelu(x, x[0, :1]),
        "float (our rule): exp": lambda: torch.exp(half),
        "float, nothing to cast: exp": lambda: torch.exp(x),
        "promote: addcmul": lambda: torch.addcmul(x, half, half),
        "sequence-promote: cat": lambda: torch.cat([x, half]),
        "banned: binary_cross_entropy": lambda: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
        "no rule: add": lambda: torch.add(x, x),
    }


def _best(call, calls):
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls


def per_op(quick=False):
    """Rows: op, best microseconds under plain native autocast in float16, and under O1; the ops are tiny."""
    turns, calls = (10, 200) if quick else (30, 500)
    native, ours = {}, {}
    # The two take turns by being switched on and off: rules are registered on the dispatcher for everybody.
    with torch.no_grad():
        for _ in range(turns):
            for name, call in _ops().items():
                with torch.autocast("cpu", torch.float16):
                    try:
                        native.setdefault(name, []).append(_best(call, calls))
                    except RuntimeError:  # native refuses mixed dtypes here
                        native.setdefault(name, []).append(float("nan"))
            _held = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)  # casts last as long as it does
            for name, call in _ops().items():
                ours.setdefault(name, []).append(_best(call, calls))
            reset()
    return [(name, min(native[name]) * 1e6, min(ours[name]) * 1e6) for name in native]


def convolution(quick=False):
    """Rows: level, ratio of a training step of one convolution to the same in float32 with plain torch."""
    turns = 5 if quick else 15

    def step_of(level):
        torch.manual_seed(0)
        model, x = torch.nn.Conv2d(16, 32, 3, padding=1), torch.randn(8, 16, 28, 28)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level is None:
            return lambda: model(x).square().mean().backward()
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

        def step():
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()

        return step

    def turn(level):
        reset()
        step = step_of(level)
        for _ in range(4):
            step()
        return _best(step, 10)

    times = {}
    for _ in range(turns):
        for level in (None, "O1", "O2", "O3"):
            times.setdefault(level, []).append(turn(level))
    reset()
    native = statistics.median(_native_convolution() for _ in range(2))
    rows = [(level, Ratio.of(times[level], times[None])) for level in ("O1", "O2", "O3")]
    return [*rows, ("plain torch in float16", native / statistics.median(times[None]))]


def _native_convolution():
    model, x = torch.nn.Conv2d(16, 32, 3, padding=1).half(), torch.randn(8, 16, 28, 28).half()
    return _best(lambda: model(x).float().square().mean().backward(), 1)


def section(device, quick):
    """The section on single ops; measured on the CPU, whatever the device."""
    rows = [[name, f"{native:.2f}", f"{ours:.2f}", f"{ours - native:+.2f}"] for name, native, ours in per_op(quick)]
    text = "## Cost of a rule per op\n\nBest microseconds of tiny ops in float16 autocast on the CPU.\n\n"
    text += report.table(["kind: op", "native autocast", "O1", "difference"], rows)
    text += "\n## float16 convolutions on the CPU\n\nA training step of one convolution, over float32's.\n\n"
    cells = [[name, ratio if isinstance(ratio, Ratio) else f"{ratio:.1f}"] for name, ratio in convolution(quick)]
    return Section(text + report.table(["", "ratio"], cells))
