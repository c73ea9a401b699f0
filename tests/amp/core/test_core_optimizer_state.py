"""State that an optimizer has from before ``initialize`` fits the params that ``initialize`` casts."""

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


def test_state_that_belongs_to_no_param_stays_as_it_is():
    model = net()
    optimizer = adam(model)
    optimizer.state["run"] = {"name": "first"}
    optimizer.state[model[0].weight] = "frozen"
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer.state["run"] == {"name": "first"}
    assert optimizer.state[next(iter(amp.master_params(optimizer)))] == "frozen"
