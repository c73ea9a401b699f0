"""A later ``initialize`` of a model alone, at another level: its optimizer would not fit it, and is asked for."""

import gc

import pytest
import torch
from amp_training import assert_masters_agree, backward, net, same, sgd, start, train
from internals import scaler_of

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CHANGES = [(before, after) for before in LEVELS for after in LEVELS if before != after]


def momentum(model):
    return sgd(model, momentum=0.9)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_level_change_needs_the_optimizer_too(before, after, torch_state):
    """A model that is initialized again at another level without its optimizer is refused, and nothing changes."""
    model, optimizer = start(before, momentum)
    train(model, optimizer, 2)
    found = torch_state(), [p.detach().clone() for p in model.parameters()], amp.state_dict()
    message = f"without its SGD, .* at {before}, and would put the model at {after} - .* - pass it too"
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(model, opt_level=after, verbosity=0)
    assert torch_state() == found[0]
    assert same(found[1], list(model.parameters()))
    assert amp.state_dict() == found[2]
    train(model, optimizer, 1)
    amp.initialize(model, optimizer, opt_level=after, verbosity=0)
    train(model, optimizer, 2)
    if after in ("O2", "O5"):
        assert_masters_agree(model)


def test_a_change_of_options_needs_the_optimizer_too():
    model, _optimizer = start("O2", momentum)
    with pytest.raises(RuntimeError, match="at O2, and would put the model at O2 with other options - "):
        amp.initialize(model, opt_level="O2", master_weights=False, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_at_the_same_level_it_keeps_its_scale(level):
    model, optimizer = start(level, momentum)
    scaler = scaler_of(optimizer)
    train(model, optimizer, 2)
    assert amp.initialize(model, opt_level=level, verbosity=0) is model  # as before every evaluation
    assert scaler_of(optimizer) is scaler
    train(model, optimizer, 1)
    assert scaler._unskipped == (0 if level in ("O0", "O3") else 3)


@pytest.mark.parametrize(("before", "after"), [("O1", "O2"), ("O2", "O1"), ("O2", "O0")])
def test_an_optimizer_that_is_gone_is_not_asked_for(before, after):
    """Its methods are bound to it, so only the garbage collector takes it: the check must not see it."""
    model, optimizer = start(before)
    train(model, optimizer, 2)
    gc.disable()
    try:
        del optimizer
        model, optimizer = amp.initialize(model, sgd(model), opt_level=after, verbosity=0)
    finally:
        gc.enable()
    train(model, optimizer, 2)


def test_masters_of_another_models_half_weights_stay():
    models = [net(0), net(1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O2", verbosity=0)
    backward(models[0], optimizer)
    before = [id(p) for p in amp.master_params(optimizer)]
    with pytest.raises(RuntimeError, match="pass it too, with all of its models"):
        amp.initialize(models[0], opt_level="O0", verbosity=0)
    assert [id(p) for p in amp.master_params(optimizer)] == before
    optimizer.step()
    train(models[1], optimizer, 1)
    amp.initialize(models, optimizer, opt_level="O0", verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_of_two_models_that_come_by_two_calls(level):
    """An encoder with the optimizer of both, then a decoder alone: as when one call gets all."""

    def encoder_and_decoder():
        torch.manual_seed(0)
        models = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)]
        return models, torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-4, momentum=0.9)

    together, of_both = encoder_and_decoder()
    amp.initialize(together, of_both, opt_level=level, verbosity=0)
    apart, optimizer = encoder_and_decoder()
    amp.initialize(apart[0], optimizer, opt_level=level, verbosity=0)
    amp.initialize(apart[1], opt_level=level, verbosity=0)
    for models, each in ((together, of_both), (apart, optimizer)):
        train(torch.nn.Sequential(*models), each, 3)
    assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))
    assert same(list(amp.master_params(optimizer)), list(amp.master_params(of_both)))


def test_not_inside_a_block():
    model, optimizer = start("O1")
    with (
        pytest.raises(RuntimeError, match="inside a scale_loss block"),
        amp.scale_loss(model(torch.ones(4, 6)).sum(), optimizer),
    ):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    train(model, optimizer, 1)
