"""Moving averages of weights as people write them."""

import copy

import pytest
import torch
from amp_training import assert_masters_agree, make_step
from nets import LEVELS, MASTER_LEVELS, Net, batch, made
from torch.optim.swa_utils import AveragedModel

from ampcompat import amp

pytestmark = pytest.mark.torch

DECAY = 0.9999


def train(model, optimizer, step):
    optimizer.zero_grad()
    make_step(optimizer, (model(batch(step)).float() - 1).pow(2).mean())


# -- how people average over state_dict(): each takes (copy, model) and updates the copy -------------------------------


def multiply_then_add(ema, model):
    """Average in place over floating values; the new values come from a detached dict."""
    values = model.state_dict()
    for name, average in ema.state_dict().items():
        if average.dtype.is_floating_point:
            average *= DECAY
            average += (1 - DECAY) * values[name].detach()


def through_data(ema, model):
    """``.data`` moves no version counter."""
    values = model.state_dict()
    for name, average in ema.state_dict().items():
        if average.is_floating_point():
            average.data.mul_(DECAY).add_(values[name].data, alpha=1 - DECAY)


def by_loading(ema, model):
    averages = {k: v.clone() for k, v in ema.state_dict().items()}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            averages[name].mul_(DECAY).add_(value, alpha=1 - DECAY)
    ema.load_state_dict(averages)


STATE_WAYS = [multiply_then_add, through_data, by_loading]


@pytest.mark.cover(2)
@pytest.mark.parametrize("look", ["at the end", "every step"])
@pytest.mark.parametrize("update", STATE_WAYS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_over_the_state_dict_it_is_the_float32_average(level, update, look):
    model, optimizer = made(level=level)
    ema = copy.deepcopy(model).eval()
    reference = {k: v.double() for k, v in model.state_dict().items() if v.is_floating_point()}
    for step in range(30):
        train(model, optimizer, step)
        with torch.no_grad():
            update(ema, model)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    reference[name].mul_(DECAY).add_(value.double(), alpha=1 - DECAY)
        if look == "every step":
            ema(batch())
    ema(batch())
    for name, want in reference.items():
        got = ema.state_dict()[name]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
    if level in MASTER_LEVELS:
        assert_masters_agree(ema)
    plain = Net()
    plain.load_state_dict(ema.state_dict())
    with amp.disable_casts():
        want = plain.eval()(batch())
    # The copy computes with the averaged weights, to the precision of its half dtype.
    torch.testing.assert_close(ema(batch()).float(), want, rtol=0, atol=0.05 if level == "O5" else 0.01)


def test_an_average_made_before_initialize_and_passed_along():
    torch.manual_seed(0)
    model = Net()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (model, ema), optimizer = amp.initialize([model, ema], optimizer, opt_level="O2", verbosity=0)
    start = ema.state_dict()["head.weight"].clone()
    for step in range(10):
        train(model, optimizer, step)
        with torch.no_grad():
            multiply_then_add(ema, model)
    ema(batch())
    assert not torch.equal(ema.state_dict()["head.weight"], start)
    assert_masters_agree(ema)


# -- over parameters(): in half, which a note at the copy says ---------------------------------------------------------
def noted(capsys):
    return capsys.readouterr().err.count("If it is to be a moving average")


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_a_half_model_is_noted_once(level, capsys):
    model, _ = made(level=level, verbosity=1)
    copy.deepcopy(model), copy.deepcopy(model), AveragedModel(model)
    assert noted(capsys) == (level in ("O2", "O3", "O5"))


def test_no_copy_is_noted_at_verbosity_0_or_of_a_plain_copy(capsys):
    model, _ = made(level="O2")
    copy.deepcopy(model)
    model, _ = made(level="O2", verbosity=1)
    copy.deepcopy(amp.unwrap(model))
    assert noted(capsys) == 0


def over_parameters(ema, model):
    with torch.no_grad():
        for average, value in zip(ema.parameters(), model.parameters(), strict=True):
            average.mul_(DECAY).add_(value, alpha=1 - DECAY)


@pytest.mark.parametrize("look", ["at the end", "every step"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_over_parameters_the_masters_of_the_copy_follow(level, look):
    model, optimizer = made(level=level)
    ema = copy.deepcopy(model)
    for step in range(20):
        train(model, optimizer, step)
        over_parameters(ema, model)
        if look == "every step":
            ema(batch())
    ema(batch()), ema(batch())
    assert_masters_agree(ema)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_no_warning_for_teachers_and_target_networks(level):
    """There is none for averages in float32 either."""
    model, optimizer = made(level=level)
    frozen, target, loaded, ema = (copy.deepcopy(model) for _ in range(4))
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(40):
        train(model, optimizer, step)
        if step % 2 == 0:  # a target network, copied whole
            with torch.no_grad():
                for a, b in zip(target.parameters(), model.parameters(), strict=True):
                    a.copy_(b)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                kept[name].mul_(0.999).add_(value, alpha=0.001)
        loaded.load_state_dict(kept)
        with torch.no_grad():
            if level == "O2":
                multiply_then_add(ema, model)
        for one in (frozen, target, loaded, ema):
            one(batch())
