"""Weights that are swapped and put back between two steps: adversarial training, evaluation of an average.

Nearly all who do it write through ``.data``, which moves no version counter.
"""

import copy
import io
import pickle

import pytest
import torch

from ampcompat import amp

LEVELS = ["O2", "O5"]


def one_weight(level, lr=1e-4, late=True):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    for _ in range(10 if late else 0):
        step(model, optimizer)
    return model, optimizer


def backward(model, optimizer):
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()


def step(model, optimizer):
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def by_data_copy(param, value):
    param.data.copy_(value)


def by_data(param, value):
    param.data = value.clone()


def by_no_grad(param, value):
    with torch.no_grad():
        param.copy_(value)


WRITERS = pytest.mark.parametrize("write", [by_data_copy, by_data, by_no_grad])
LATE = pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])


@WRITERS
@LATE
@pytest.mark.parametrize("level", LEVELS)
def test_saves_and_copies_have_the_swapped_weights(level, late, write):
    """They have what the model computes with."""
    model, _ = one_weight(level, late=late)
    write(model.weight, torch.full_like(model.weight, 5.0))
    want = torch.full((1, 4), 5.0)
    assert torch.equal(copy.deepcopy(model).state_dict()["weight"], want)
    assert torch.equal(pickle.loads(pickle.dumps(model)).state_dict()["weight"], want)
    assert torch.equal(amp.unwrap(model).weight, want)
    assert torch.equal(model.state_dict()["weight"], want)
    assert torch.equal(model(torch.ones(1, 4)).detach().float(), torch.full((1, 1), 20.0))


@WRITERS
@LATE
@pytest.mark.parametrize("level", LEVELS)
def test_an_attack_taken_back_leaves_the_masters(level, late, write):
    """Weights that are perturbed for a backward pass and written back train as without it."""
    ends = []
    for attacked in (True, False):
        model, optimizer = one_weight(level, late=late)
        for _ in range(30):
            backward(model, optimizer)
            if attacked:
                backup = model.weight.data.clone()
                for _ in range(2):
                    write(model.weight, model.weight.data + 0.125)
                    backward(model, optimizer)
                write(model.weight, backup)
            else:
                backward(model, optimizer)
                backward(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(next(amp.master_params(optimizer)).detach().clone())
    assert torch.equal(*ends)
    assert ends[0][0, 0] < 0.9999  # it moves by less than half an ulp a step


@WRITERS
@LATE
@pytest.mark.parametrize("level", LEVELS)
def test_swapping_in_an_average_leaves_the_masters(level, late, write):
    """An average is written into the model, evaluated and saved, and the weights are written back."""
    model, optimizer = one_weight(level, late=late)
    for at in range(6):
        step(model, optimizer)
        before = next(amp.master_params(optimizer)).detach().clone()
        backup = model.weight.data.clone()
        write(model.weight, torch.full_like(model.weight, 3.0))
        model(torch.ones(1, 4))
        if at % 2:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            assert torch.equal(torch.load(file, weights_only=True)["weight"], torch.full((1, 4), 3.0))
        write(model.weight, backup)
        model(torch.ones(1, 4))
        assert torch.equal(next(amp.master_params(optimizer)), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_that_stays_is_trained_on(level):
    model, optimizer = one_weight(level)
    by_no_grad(model.weight, torch.full_like(model.weight, 2.0))
    step(model, optimizer)
    master = next(amp.master_params(optimizer))
    assert torch.allclose(master, torch.tensor(2.0 - 1e-4), atol=1e-6)
    by_no_grad(model.weight, torch.full_like(model.weight, 1.0))  # what it was before the step is no backup any more
    model(torch.ones(1, 4))
    assert torch.equal(master, torch.ones(1, 4))


@pytest.mark.parametrize("level", LEVELS)
def test_an_average_over_state_dict_values_stands_after_a_swap(level):
    model, optimizer = one_weight(level)
    backup = model.weight.data.clone()
    by_no_grad(model.weight, torch.full_like(model.weight, 3.0))
    model(torch.ones(1, 4))
    by_no_grad(model.weight, backup)
    model(torch.ones(1, 4))
    model.state_dict()["weight"].data.add_(2.0**-20)
    want = model.state_dict()["weight"].clone()
    model(torch.ones(1, 4))
    assert torch.equal(next(amp.master_params(optimizer)), want)
