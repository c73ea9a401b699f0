"""Running statistics in half: batch norm writes them in a forward, and moves no version counter."""

import copy

import pytest
import torch
from amp_training import make_step
from seeded import seeded
from torch import nn

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]


def statistics(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


def rounded(model):
    return {name: value.float() for name, value in model.named_buffers() if "running" in name}


def train(model, optimizer, steps=3):
    for seed in range(steps):
        x = torch.randn(8, 4, 3, generator=seeded(seed)) + seed
        make_step(optimizer, model(x).float().square().mean())
        optimizer.zero_grad()


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "not affine": lambda: nn.BatchNorm1d(4, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
}


def start(level, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), NORMS[kind]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, keep_batchnorm_fp32=False, verbosity=0)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_statistics_trained_after_loading_are_saved(level, kind):
    """The model was loaded and evaluated before it was trained."""
    model, optimizer = start(level, kind)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.eval()
    for _ in range(8):  # past the rounds in which masters are compared by value
        model(torch.ones(2, 4, 3))
    before = statistics(model)
    for _ in range(8):
        model(torch.ones(2, 4, 3))
    model.train()
    train(model, optimizer)
    copied, plain = copy.deepcopy(model), amp.unwrap(model)
    assert not any(torch.equal(value, before[name]) for name, value in statistics(model).items())
    for now in (statistics(model), statistics(copied), statistics(plain), rounded(plain)):
        assert all(torch.equal(value, now[name]) for name, value in rounded(model).items())
    amp.initialize(model, optimizer, enabled=False)
    assert all(torch.equal(value, rounded(plain)[name]) for name, value in rounded(model).items())


def test_eval_keeps_the_low_bits_of_loaded_statistics():
    model, _ = start("O2", "batch norm")
    exact = {name: torch.rand_like(value) for name, value in statistics(model).items()}
    model.load_state_dict(exact, strict=False)
    model.eval()
    for _ in range(8):
        model(torch.ones(2, 4, 3))
    assert all(torch.equal(value, exact[name]) for name, value in statistics(model).items())


def test_several_forwards_before_one_backward():
    model, optimizer = start("O2", "batch norm")
    first = statistics(model)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for seed in range(6):
        parts = [model(torch.randn(8, 4, 3, generator=seeded(10 * seed + i))) for i in range(3)]
        loss = sum(part.float().square().mean() for part in parts) * 0.01  # more would overflow, and skip
        make_step(optimizer, loss)
        optimizer.zero_grad()
        assert not amp.step_was_skipped(optimizer)
        for name, value in rounded(model).items():  # batch norm wrote half, and that is what is saved
            assert torch.equal(statistics(model)[name], value)
    assert model[1].num_batches_tracked == 18
    assert not any(torch.equal(value, first[name]) for name, value in statistics(model).items())
    assert not all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))


class Averaging(nn.Module):
    """Assigns its buffer in each forward, computed in ``dtype`` (None: as it comes)."""

    def __init__(self, dtype=None):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.dtype = dtype
        self.register_buffer("mean", torch.full((4,), 1 / 3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        mean = self.mean if self.dtype is None else self.mean.to(self.dtype)
        self.mean = mean * 0.9 + x.mean((0, -1)).to(mean.dtype) * 0.1
        self.last = x.to(mean.dtype).sum(-1)
        return self.layer(x.mean(-1) - self.mean.to(x.dtype))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_saving_does_not_change_assigned_buffers(level, dtype):
    """A buffer that the forward assigns is what it assigned, however often the model is saved in between."""
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Averaging(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        for seed in range(4):
            if saves:
                saved = model.state_dict()
                assert torch.equal(saved["mean"].to(model.mean.dtype), model.mean) or not seed
                amp.unwrap(model)
            train(model, optimizer, 1)
        ends.append((model.mean, model.last, model.layer.weight.detach()))
    for one, other in zip(*ends, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
