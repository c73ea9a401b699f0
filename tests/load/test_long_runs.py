"""Long runs and large models: memory stays, work per step stays, and the scale goes where the rule says.

Work is counted, as lines of ampcompat that run and ops that are dispatched, and never timed.
"""

import gc
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from internals import reset
from torch.utils._python_dispatch import TorchDispatchMode

import ampcompat
from ampcompat import amp

HOME = ampcompat.__path__[0]
STEPS = 100_000


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def work_of(call):
    """(Lines of ampcompat, ops dispatched) in ``call()``."""
    lines = [0]

    def local(frame, event, arg):
        lines[0] += event == "line"
        return local

    with Ops() as ops:
        sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(HOME) else None)
        try:
            call()
        finally:
            sys.settrace(None)
    return lines[0], ops.count


def live_objects():
    gc.collect()
    return len(gc.get_objects())


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from Linux's /proc")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_hundred_thousand_steps(opt_level, capsys):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    x, bad, chance = torch.ones(1, 2), float("inf"), random.Random(0)
    scaler = amp._amp_state.loss_scalers[0]
    scale, unskipped, skipped = 2.0**16, 0, 0

    def step(factor=1.0):
        loss = model(x).float().sum() * (factor * 2.0**-12)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        overflow = chance.random() < 1 / 3000
        step(bad if overflow else 1.0)
        overflow |= opt_level == "O2" and scale * 2.0**-12 > 65504
        unskipped += 1
        if overflow:
            scale, unskipped, skipped = max(2.0**-24, scale / 2), 0, skipped + 1
        elif unskipped == 2000:
            scale, unskipped = min(2.0**24, scale * 2), 0
        if number % 500 == 0:
            assert (scaler.loss_scale(), scaler._unskipped) == (scale, unskipped), number
        if number == 1000:
            early, objects, held = work_of(step), live_objects(), resident()
            unskipped += 1
    assert work_of(step) == early
    assert live_objects() < objects + 1000
    assert resident() < held + 8 * 2**20  # bytes; a tensor kept per step would be ten times that
    assert skipped > 10


class Many(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(count)])

    def forward(self):
        return torch.stack(list(self.all)).float().sum() * 2.0**-6


@pytest.mark.slow
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_ten_thousand_parameters(opt_level):
    """Work per parameter is the same for many as for few, at every step."""

    def make(count):
        reset()
        model = Many(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

        def step():
            with amp.scale_loss(model(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    costs = {}
    for count in (1_000, 10_000):
        model, step = make(count)
        for _ in range(20):  # the first ones compare masters by value and watch what becomes of the loss
            step()
        costs[count] = work_of(step)
        for _ in range(10):
            step()
        assert work_of(step) == costs[count]
        value = 1 - 20 * 2.0**-16
        assert all((p.detach().float() - value).abs().max() < 2.0**-11 for p in model.parameters())
    few, many = costs[1_000], costs[10_000]
    assert many[0] < 10.5 * few[0]
    assert many[1] < 10.5 * few[1]
