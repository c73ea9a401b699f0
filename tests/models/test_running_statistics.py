"""Running statistics in half: batch norm writes them in a forward, and moves no version counter."""

import copy

import pytest
import torch
from torch import nn

from ampcompat import amp


def statistics(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


def rounded(model):
    return {name: value.float() for name, value in model.named_buffers() if "running" in name}


def train(model, optimizer, steps=3):
    for seed in range(steps):
        x = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(seed)) + seed
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
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
def test_a_model_that_was_loaded_and_evaluated_first_saves_what_training_made(level, kind):
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
        parts = [model(torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(10 * seed + i))) for i in range(3)]
        loss = sum(part.float().square().mean() for part in parts) * 0.01  # more would overflow, and skip
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not amp.step_was_skipped(optimizer)
        for name, value in rounded(model).items():  # batch norm wrote half, and that is what is saved
            assert torch.equal(statistics(model)[name], value)
    assert model[1].num_batches_tracked == 18
    assert not any(torch.equal(value, first[name]) for name, value in statistics(model).items())
    assert not all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
