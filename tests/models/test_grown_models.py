"""Modules that are added or replaced after ``initialize``: progressive growing, a new head."""

import copy
import sys

import pytest
import torch
from amp_training import assert_masters_agree, make_step
from internals import masters_by_name
from nets import batch, made

from ampcompat import amp

pytestmark = pytest.mark.device

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def grow(model, optimizer, level, trained=True):
    torch.manual_seed(1)
    model.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(HALF[level])
    if trained:
        params = optimizer.param_groups[0]["params"]
        for old in params[-2:]:
            optimizer.state.pop(old, None)
        del params[-2:]
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.05})


def train(model, optimizer, seeds):
    for seed in seeds:
        make_step(optimizer, model(batch(seed)).float().pow(2).mean())
        optimizer.zero_grad()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("level", HALF)
def test_a_new_head_is_saved_and_unwrapped_in_float32(level, trained):
    model, optimizer = made(level=level, lr=0.05)
    train(model, optimizer, range(2))
    grow(model, optimizer, level, trained)
    if trained:
        train(model, optimizer, range(2, 6))
    for found in (model.state_dict(), model.head.state_dict(prefix="head."), amp.unwrap(model).state_dict()):
        assert all(value.dtype == torch.float32 for value in found.values() if value.is_floating_point())
    head = {name: value for name, value in model.state_dict().items() if name.startswith("head")}
    assert len(head) == 4
    if trained and level != "O3":
        held = {id(p) for p in amp.master_params(optimizer)}
        masters = [m.value for part in model.head for m in masters_by_name(part).values()]
        assert len(masters) == 4
        assert all(id(m) in held for m in masters)
        assert any(not torch.equal(value, value.to(HALF[level]).float()) for value in head.values())  # low bits
        assert_masters_agree(model)
    for name, value in amp.unwrap(model).state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_run_that_grew_resumes_to_the_bit(level):
    model, optimizer = made(level=level, lr=0.05)
    train(model, optimizer, range(2))
    grow(model, optimizer, level)
    train(model, optimizer, range(2, 5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    train(model, optimizer, range(5, 8))
    want = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = made(level=level, lr=0.05)
    grow(model, optimizer, level)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    train(model, optimizer, range(5, 8))
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_half_parameter_of_no_model_is_trained_by_a_master(level):
    model, optimizer = made(level=level, lr=0.05)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    loose = torch.nn.Parameter(torch.ones(4, dtype=HALF[level]))
    optimizer.add_param_group({"params": [loose], "lr": 2.0**-14, "momentum": 0.0})
    for _ in range(3):
        make_step(optimizer, loose.float().sum() + model(batch()).sum() * 0)
        optimizer.zero_grad()
    *_, master = amp.master_params(optimizer)
    assert torch.equal(master, torch.full((4,), 1 - 3 * 2.0**-14))  # no half holds it
    assert torch.equal(loose, master.to(HALF[level]))


def pair(level):
    """Two models of two layers, their optimizers, and what a forward of the first is given."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(8))
    return models, optimizers


def by_index(a, b):
    a[0] = b[0]


def by_name(a, b):
    a.add_module("0", b[0])


def in_a_wrapper(a, b):
    a[0] = torch.nn.Sequential(torch.nn.Identity(), b[0])


MOVES = pytest.mark.parametrize("move", [by_index, by_name, in_a_wrapper])


@MOVES
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_layer_of_another_model_is_trained_by_its_optimizer(level, move):
    (a, b), optimizers = pair(level)
    dead = [p.detach().clone() for p in amp.master_params(optimizers[0])][:2]
    layer = b[0]
    move(a, b)
    before = b.state_dict()["0.weight"].clone()
    with amp.scale_loss((layer.weight.float() * 2.0**-6).sum() + 0 * a(batch()).sum(), optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(b.state_dict()["0.weight"], before - 0.5 * 2.0**-6)
    assert all(torch.equal(old, now) for old, now in zip(dead, amp.master_params(optimizers[0]), strict=False))
    assert_masters_agree(a)
    for model in (amp.unwrap(a), copy.deepcopy(a)):
        assert any(torch.equal(value, before - 0.5 * 2.0**-6) for value in model.state_dict().values())
    amp.initialize([a, b], optimizers, enabled=False)
    assert all(p.dtype == torch.float32 for model in (a, b) for p in model.parameters())


# -- groups that are added one by one ----------------------------------------------------------------------------------
def calls_of(function):
    """How many functions of ampcompat ``function()`` calls."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        if event == "call" and "ampcompat" in frame.f_code.co_filename:
            count += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("level", ["O1", *HALF])
def test_an_added_group_costs_the_same_however_many_there_are(level):
    layers = [torch.nn.Linear(2, 2) for _ in range(40)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    calls = []
    for layer in layers[1:]:
        calls.append(calls_of(lambda layer=layer: optimizer.add_param_group({"params": list(layer.parameters())})))
    assert calls[-1] == calls[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_step(optimizer, sum(param.float().sum() for param in model.parameters()))
    after = model.state_dict()
    assert all((after[name] < value).all() for name, value in before.items())


@pytest.mark.parametrize("level", ["O1", *HALF])
def test_a_parameter_that_goes_to_a_new_group_keeps_its_gradient(level):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    before = model.state_dict()["bias"].clone()
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.25})
    optimizer.step()
    torch.testing.assert_close(before - model.state_dict()["bias"], torch.full((2,), 0.25), rtol=0, atol=2e-3)
