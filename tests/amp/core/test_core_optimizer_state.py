"""State that an optimizer has from before ``initialize`` fits the params that ``initialize`` casts."""

import copy

import pytest
import torch
from torch import nn

from ampcompat import amp

LEVELS = ("O0", "O1", "O2", "O3")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def step(model, optimizer):
    loss = model(torch.ones(3, 4)).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_the_load_may_come_before_or_after_initialize(level):
    model = net()
    model, optimizer = amp.initialize(model, adam(model), opt_level=level, loss_scale=128.0, verbosity=0)
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    for before in (True, False):
        again = net()
        resumed = adam(again)
        if before:
            again.load_state_dict(saved[0])
            resumed.load_state_dict(copy.deepcopy(saved[1]))
        again, resumed = amp.initialize(again, resumed, opt_level=level, loss_scale=128.0, verbosity=0)
        if not before:
            again.load_state_dict(saved[0])
            resumed.load_state_dict(copy.deepcopy(saved[1]))
        step(again, resumed)
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), (before, name)


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_any_level_may_follow_any(first, second):
    model = net()
    optimizer = adam(model)
    for level in (first, second):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        step(model, optimizer)
    for param, held in optimizer.state.items():
        assert held["exp_avg"].dtype == param.dtype
        assert held["step"].dtype == torch.float32


def test_a_refused_call_leaves_the_state_alone(monkeypatch):
    model = net()
    optimizer = adam(model)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    held = dict(optimizer.state)

    def fail(self):
        raise RuntimeError("no")

    from ampcompat.amp.session import Session

    monkeypatch.setattr(Session, "begin_casts", fail)
    with pytest.raises(RuntimeError, match="no"):
        amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert list(optimizer.state) == list(held)
    for param, before in held.items():
        assert param.dtype == torch.float32
        assert optimizer.state[param] is before
        assert before["exp_avg"].dtype == torch.float32


def test_state_that_belongs_to_no_param_stays_as_it_is():
    model = net()
    optimizer = adam(model)
    optimizer.state["run"] = {"name": "first"}
    optimizer.state[model[0].weight] = "frozen"
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer.state["run"] == {"name": "first"}
    assert optimizer.state[next(iter(amp.master_params(optimizer)))] == "frozen"
