"""The optimizers and LARC under amp.initialize and scale_loss, at every level."""

import copy

import pytest
import torch
from amp_training import make_step
from seeded import seeded

from ampcompat import amp
from ampcompat.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from ampcompat.parallel.LARC import LARC

pytestmark = pytest.mark.torch

MAKERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.02, weight_decay=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.02, momentum=0.9, weight_decay=0.001),
    "FusedSGD damped": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.02),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.02),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.05),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=0.05),
    "LARC": lambda params: LARC(FusedSGD(params, lr=0.1, momentum=0.9), trust_coefficient=0.05),
    "LARC of torch": lambda params: LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9), 0.05, clip=False),
}
makers = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def batch(step):
    generator = seeded(step % 4)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :2] * 0.5


def initialized(maker, level, seed=0):
    model = make_model(seed)
    return amp.initialize(model, maker(model.parameters()), opt_level=level, verbosity=0)


def train(model, optimizer, steps, scheduler=None, overflow_at=()):
    losses = []
    for step in steps:
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
        if step in overflow_at:
            loss = loss * float("inf")
        optimizer.zero_grad()
        make_step(optimizer, loss)
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def state_of(optimizer):
    """State and counts as saved, tensors cloned."""
    return copy.deepcopy(optimizer.state_dict())


def assert_same_state(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][key][name])), name


@pytest.mark.cover(1)
@levels
@makers
def test_trains_with_a_scheduler_on_it(maker, level):
    model, optimizer = initialized(maker, level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.5)
    losses = train(model, optimizer, range(40), scheduler)
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


@makers
def test_O0_changes_nothing(maker):
    ours, first = initialized(maker, "O0")
    plain = make_model()
    second = maker(plain.parameters())
    train(ours, first, range(4))
    for step in range(4):
        x, y = batch(step)
        second.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        second.step()
    for a, b in zip(ours.parameters(), plain.parameters()):
        # With a found_inf flag the step is counted on the device, whose bias corrections are float32.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
@makers
def test_an_overflow_skips_everything_the_first_step_too(maker, level, capsys):
    model, optimizer = initialized(maker, level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    train(model, optimizer, range(1), scheduler, overflow_at=[0])
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer)))
    assert optimizer.state_dict()["param_groups"][0].get("step", 0) == 0
    train(model, optimizer, range(1, 4), scheduler)
    after, saved = [p.detach().clone() for p in amp.master_params(optimizer)], state_of(optimizer)
    assert all(p.isfinite().all() for p in after)
    train(model, optimizer, range(4, 5), scheduler, overflow_at=[4])
    assert all(torch.equal(a, b) for a, b in zip(after, amp.master_params(optimizer)))
    assert_same_state(saved, state_of(optimizer))


@levels
@makers
def test_resume_is_bitwise(maker, level):
    model, optimizer = initialized(maker, level)
    train(model, optimizer, range(3))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    wanted = train(model, optimizer, range(3, 6))

    again, other = initialized(maker, level, seed=1)
    again.load_state_dict(checkpoint[0])
    other.load_state_dict(checkpoint[1])
    amp.load_state_dict(checkpoint[2])
    assert train(again, other, range(3, 6)) == wanted
    assert_same_state(optimizer.state_dict(), other.state_dict())


@pytest.mark.cover(1)
@levels
@makers
def test_groups_can_be_added_later(maker, level):
    model, late = make_model(), torch.nn.Linear(2, 2)
    optimizer = maker(model.parameters())
    (model, late), optimizer = amp.initialize([model, late], optimizer, opt_level=level, verbosity=0)
    both = torch.nn.Sequential(model, late)
    train(both, optimizer, range(2))
    before = late.weight.detach().clone()
    late.zero_grad()  # what blocks have left to it is scaled
    optimizer.add_param_group({"params": late.parameters()})
    train(both, optimizer, range(2, 8))
    assert len(optimizer.param_groups) == 2
    assert not torch.equal(before, late.weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
@makers
def test_closure_and_its_overflow(maker, level, capsys):
    model, optimizer = initialized(maker, level)
    factor = 1.0

    def closure():
        x, y = batch(0)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y) * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    before, saved = [p.detach().clone() for p in amp.master_params(optimizer)], state_of(optimizer)
    factor = float("inf")
    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer)))
    assert_same_state(saved, state_of(optimizer))
