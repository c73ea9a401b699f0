"""What a step costs, counted: dispatcher calls, host syncs, bytes. Counts do not depend on the machine."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from counting import Counter, peak_bytes

from ampcompat import amp
from ampcompat._torch import chunks

pytestmark = pytest.mark.torch


class Idle(torch.optim.Optimizer):
    """Holds parameters and does not step them: what is counted is amp's."""

    takes_found_inf = False

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        if self.takes_found_inf:
            self._step_supports_amp_scaling = True

    def step(self, closure=None):
        return None


class OnDevice(Idle):
    takes_found_inf = True


class Tensors(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.held = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4)) for _ in range(count))

    def forward(self, x):
        return x


def counted_step(level, size, kind=Idle, overflow=False, settle=8):
    """Ops and syncs of one block and one step, after ``settle`` others."""
    model = Tensors(size)
    model, optimizer = amp.initialize(model, kind(model.parameters()), opt_level=level, verbosity=0)
    loss = torch.ones(())

    def step(value):
        model(loss)
        with amp.scale_loss(loss, optimizer):
            for param in model.parameters():
                param.grad = torch.full_like(param, value)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(settle):
        step(1.0)
    with Counter() as setting:  # what setting the gradients takes is not amp's
        for param in model.parameters():
            torch.full_like(param, 1.0)
    with Counter() as counter:
        step(float("inf") if overflow else 1.0)
    return counter.ops - setting.ops, counter.syncs


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [Idle, OnDevice])
def test_host_syncs_per_step(level, kind):
    scales = level in ("O1", "O2")
    assert counted_step(level, 5, kind)[1] == int(scales and kind is Idle)


def test_the_counter_sees_syncs():
    with Counter() as counter:
        bool(torch.ones(()) > 0)
        torch.ones(2).sum().item()
    assert counter.syncs == 2


def test_the_first_step_costs_what_any_other_does():
    ops, syncs = counted_step("O2", 5, settle=0)
    assert syncs == 1
    assert ops <= counted_step("O2", 5)[0] + 12  # the scale's tensors are made
    assert counted_step("O2", 5, OnDevice, settle=0)[1] == 0  # a CUDA graph may capture it


@pytest.mark.on_cpu
def test_o1_calls_do_not_grow_with_parameters():
    """The dispatcher's calls of a step are as many for 10 as for 300 parameters."""
    few, many = counted_step("O1", 10)[0], counted_step("O1", 300)[0]
    assert few == many <= 12


@pytest.mark.on_cpu
@pytest.mark.parametrize("delay_unscale", [False, True])
def test_calls_that_add_to_older_gradients_do_not_grow_with_parameters(delay_unscale):
    def calls(size):
        model = Tensors(size)
        model, optimizer = amp.initialize(model, Idle(model.parameters()), opt_level="O1", verbosity=0)
        for _ in range(3):
            grads = list(map(torch.ones_like, model.parameters()))
            with Counter() as counter, amp.scale_loss(torch.ones(()), optimizer, delay_unscale=delay_unscale):
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param.grad = grad
        return counter.ops

    assert calls(10) == calls(300)


@pytest.mark.on_cpu
def test_dispatcher_calls_at_o1_are_fewer_than_gradscalers():
    model = Tensors(10)
    optimizer, scaler = Idle(model.parameters()), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(torch.ones(()))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    with Counter() as counter:
        step()
    assert counted_step("O1", 10)[0] < counter.ops - 11  # ten gradients and a loss


def test_a_master_takes_one_dispatcher_call():
    # Which makes its float32 gradient. Unscaling and the way back to half run in fused passes.
    assert counted_step("O2", 310)[0] - counted_step("O2", 10)[0] == 300


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_levels_without_scaling_add_nothing(level):
    assert counted_step(level, 300)[0] <= 6  # the input's cast and the output's


@pytest.mark.on_cpu
def test_bytes_per_parameter_at_o2_with_adam(monkeypatch):
    """20 in the optimizer, with the half gradients that outlive it; 20 and one chunk where a block ends."""
    width, layers = 128, 16
    count = layers * width * (width + 1)
    monkeypatch.setattr(chunks, "CPU_CHUNK", count // 16)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    x = torch.randn(2, width)

    def step():
        for name in ("first block", "accumulated block"):
            manager = amp.scale_loss(model(x).float().square().mean(), optimizer)
            manager.__enter__().backward()
            with torch.profiler.record_function(name):
                manager.__exit__(None, None, None)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()
    held = 2 + 4 + 8  # half weights, masters, moments
    found = peak_bytes(step, {"first block", "accumulated block", "Optimizer.step#AdamW.step"})
    found = {name: held + peak / count for name, peak in found.items()}
    assert found["Optimizer.step#AdamW.step"] <= 20.5
    # Half gradients stay readable until they are cleared: 20, and a sixteenth of the new gradients in float32.
    assert found["first block"] <= 20.25
    assert found["accumulated block"] <= 20.5
    torch.testing.assert_close(found["accumulated block"], found["first block"], rtol=0, atol=0.5)


def test_chunks_change_no_bit(monkeypatch):
    torch.manual_seed(0)
    plain, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8)
    found = []
    for chunk in (1, 100, 2**24):
        monkeypatch.setattr(chunks, "CPU_CHUNK", chunk)
        model = copy.deepcopy(plain)
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0
        )
        for _ in range(2):
            with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
                scaled.backward()
        found.append([p.grad.clone() for p in amp.master_params(optimizer)])
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


def python_calls(level, layers):
    """Calls of ampcompat's own Python functions in one training step of ``layers`` linear layers."""
    gc.collect()  # other tests' optimizers
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    model, optimizer = amp.initialize(model, Idle(model.parameters()), opt_level=level, verbosity=0)
    x, calls = torch.ones(2, 4), []

    def step():
        with amp.scale_loss(model(x).mean() * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    own = str(Path(amp.__file__).parent.parent)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_filename.startswith(own)))
    try:
        step()
    finally:
        sys.setprofile(before)
    return sum(calls)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_python_calls_depend_neither_on_ops_nor_on_parameters(level):
    assert python_calls(level, 2) == python_calls(level, 60)
