"""With an optimizer that takes ``found_inf`` nothing is asked of the device: on a fake CUDA tensor that raises."""

import functools

import pytest
import torch
from amp_training import INF, backward, sgd, start, train
from internals import skipped_as_far_as_known
from torch._subclasses.fake_tensor import FakeTensorMode

from ampcompat import _torch, amp

pytestmark = [pytest.mark.device, pytest.mark.torch]

SAID = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}\n"


class TakesFoundInf(torch.optim.SGD):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(torch.where(self.found_inf.bool(), 0.0, param.grad))


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 2, device="cuda:0"))

    def forward(self, x):
        return torch.relu(x)


class Delivered:
    """Stands for a copy to the host that arrives when the test says so."""

    arrive = False

    def __init__(self, values):
        self.values = [value.clone() for value in values]

    def arrived(self):
        return Delivered.arrive

    def read(self):
        return [float(v) for v in self.values]


def fake_step(model, optimizer):
    model(torch.ones(4, 6, device="cuda:0"))
    with amp.scale_loss(torch.ones((), device="cuda:0"), optimizer):
        for param in model.parameters():  # the autograd engine does not run on fake CUDA tensors
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def test_no_sync_with_found_inf_and_one_without(monkeypatch):
    monkeypatch.setattr(_torch, "HostCopy", Delivered)
    monkeypatch.setattr(Delivered, "arrive", False)
    monkeypatch.setattr(_torch, "update_scale_", lambda *args: None)  # a CUDA kernel that has no fake counterpart
    with FakeTensorMode():
        for kind in (TakesFoundInf, torch.optim.SGD):
            model = Weights()
            optimizer = kind(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
            if kind is TakesFoundInf:
                for _ in range(4):
                    fake_step(model, optimizer)
            else:
                with pytest.raises(Exception, match="item|_local_scalar_dense"):
                    fake_step(model, optimizer)


def test_what_the_device_skipped_is_said_by_a_later_step(monkeypatch, capsys):
    monkeypatch.setattr(_torch, "HostCopy", Delivered)
    monkeypatch.setattr(Delivered, "arrive", False)
    model, optimizer = start("O2", lambda m: torch.optim.AdamW(m.parameters(), fused=True))
    for step in range(4):
        backward(model, optimizer, step, times=INF if step in (0, 2) else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(Delivered, "arrive", True)
    backward(model, optimizer)
    assert capsys.readouterr().out == ""
    optimizer.step()
    # Each with the scale of its own time.
    assert capsys.readouterr().out == SAID.format(32768.0) + SAID.format(16384.0)


def test_asking_reads_what_has_not_arrived(monkeypatch, capsys):
    monkeypatch.setattr(_torch, "HostCopy", Delivered)
    monkeypatch.setattr(Delivered, "arrive", False)
    model, optimizer = start("O2", lambda m: torch.optim.AdamW(m.parameters(), fused=True))
    for times, skipped in ((INF, True), (1.0, False), (INF, True)):
        backward(model, optimizer, times=times)
        optimizer.step()
        optimizer.zero_grad()
        assert skipped_as_far_as_known(optimizer) is None
        assert amp.step_was_skipped(optimizer) is skipped
    assert capsys.readouterr().out == SAID.format(32768.0) + SAID.format(16384.0)


def test_a_copy_in_host_memory_has_arrived():
    copy = _torch.HostCopy([torch.tensor(1.0, device="cpu"), torch.tensor(2.0, device="cpu")])
    assert copy.arrived()
    assert copy.read() == [1.0, 2.0]


def test_an_optimizer_without_found_inf_knows_at_once():
    model, optimizer = start("O2", sgd)
    train(model, optimizer, 1)
    assert skipped_as_far_as_known(optimizer) is False


def with_momentum(model, fused):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=fused)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_fused_sgd_momentum_after_a_first_overflow(level):
    """torch's kernel makes the buffer without values, and fills it only if it is not told to skip."""
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        model, optimizer = start(level, functools.partial(with_momentum, fused=fused), loss_scale="dynamic")
        held = [torch.full_like(p, 1e30, dtype=torch.float32) for p in model.parameters() for _ in range(64)]
        del held  # memory that an uninitialised buffer would get
        for step in range(3):
            backward(model, optimizer, step, times=1.0 if step else INF)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach().float() for p in model.parameters()])
    torch.testing.assert_close(*weights)
