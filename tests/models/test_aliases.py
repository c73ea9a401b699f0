"""Writes through aliases that are alive while a model is saved or copied."""

import copy

import pytest
import torch
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch


def start(level="O2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 4))
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


def save(model):
    model.state_dict()


@pytest.mark.parametrize("look", [save, copy.deepcopy, amp.unwrap])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_half_buffer_that_is_written_after_a_save(look, level):
    model, _ = start(level)
    look(model)
    model[1].running_mean.data.fill_(5)
    assert model.state_dict()["1.running_mean"].eq(5).all()
    look(model)
    before = model.state_dict()["1.running_mean"].clone()
    model[1](torch.ones(4, 8, dtype=model[1].running_mean.dtype))  # past the model's own forward
    assert not torch.equal(before, model.state_dict()["1.running_mean"])


def test_a_weight_written_through_an_alias_from_before_the_save():
    """No step comes between: the next one would round the master over what is written after it."""
    model, _ = start()
    alias = model[0].weight.data
    save(model)
    alias.zero_()
    model(torch.ones(4, 8))
    assert not model[0].weight.any()
    assert not model.state_dict()["0.weight"].any()


def test_one_layer_written_from_the_state_dict_of_the_other():
    model, _ = start()
    model[2].bias.data.copy_(model.state_dict()["0.bias"][:4])
    model(torch.ones(4, 8))
    assert torch.equal(model[2].bias, model[0].bias[:4])


@pytest.mark.parametrize("look", [copy.deepcopy, amp.unwrap])
def test_a_copy_has_what_was_loaded_into_the_values_of_a_state_dict(look):
    """The loader that copies what fits, key by key."""
    model, _ = start()
    own = model.state_dict()
    loaded = {name: torch.full_like(value, 0.25) for name, value in own.items()}
    for name, value in own.items():
        value.copy_(loaded[name])
    for name, value in look(model).state_dict().items():
        assert torch.equal(value, loaded[name]), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name]), name


def test_a_float32_average_stays_float32_when_it_is_saved():
    """It moves by less than half precision can tell."""
    model, _ = start()
    average = copy.deepcopy(model).float()
    for step in range(4):
        for held, now in zip(average.parameters(), model.parameters(), strict=True):
            held.data.add_(now.data.float(), alpha=2.0**-14)
        if step == 1:
            average.state_dict()
    for held, now in zip(average.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(held.data, now.float() * (1 + 4 * 2.0**-14), rtol=1e-6, atol=0)


def test_a_weight_that_is_tied_to_another_later_is_trained_in_silence():
    """As ``tie_weights()`` of transformers does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model[1].weight = model[0].weight
    with amp.scale_loss(model(torch.ones(4, 8)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)).half(), model[1].weight)
