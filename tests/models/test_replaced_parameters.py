"""A script replaces half weights by parameters of its own: as in plain torch, the optimizer holds the old ones."""

import pytest
import torch
from amp_training import assert_masters_agree
from nets import MASTER_LEVELS, Tied
from seeded import seeded
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch

LEVEL = pytest.mark.parametrize("level", MASTER_LEVELS)
HALF = {"O2": torch.float16, "O5": torch.bfloat16}


def started(level, kind=Tied):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x)


def step(model, optimizer):
    with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def new_parameter(level):
    return nn.Parameter(torch.randn(4, 4, generator=seeded(1)).to(HALF[level]))


@LEVEL
@pytest.mark.filterwarnings("ignore:optimizer.step.. after scale_loss blocks that gave")
def test_it_is_said_once_and_the_new_one_is_not_trained(level):
    model, optimizer = started(level, One)
    new = model.layer.weight = new_parameter(level)
    before = new.detach().clone()
    step(model, optimizer)
    assert torch.equal(new, before)
    with pytest.warns(
        UserWarning, match="Parameter 'weight' of shape .* was replaced after amp.initialize - the optimizer holds"
    ):
        model.state_dict()
    model.state_dict()


class Two(nn.Module):
    """Two weights of one name in their modules, and of different shapes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


@LEVEL
def test_each_of_one_name_is_told(level):
    model, _optimizer = started(level, Two)
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    with pytest.warns(UserWarning, match="was replaced") as said:
        model.state_dict()
    model.state_dict()  # says nothing more
    texts = [str(warning.message) for warning in said]
    assert [text[: text.index(" was")] for text in texts] == [
        "Parameter 'weight' of shape (3, 4)",
        "Parameter 'weight' of shape (4, 3)",
    ]


@LEVEL
def test_a_save_says_so_too(level):
    model, _optimizer = started(level, One)
    new = model.layer.weight = new_parameter(level)
    with pytest.warns(UserWarning, match="Parameter 'weight' of shape .* was replaced after amp.initialize"):
        saved = model.state_dict()
    assert torch.equal(saved["layer.weight"], new.detach().float())


@LEVEL
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:Parameter 'weight' of shape .* was replaced after amp.initialize")
def test_one_that_is_added_is_trained_in_its_group(level, when):
    model, optimizer = started(level, One)
    new = new_parameter(level)
    start = new.detach().float()
    if when == "before":
        optimizer.add_param_group({"params": [new], "lr": 0.25})
        model.layer.weight = new
    else:
        model.layer.weight = new
        optimizer.add_param_group({"params": [new], "lr": 0.25})
    step(model, optimizer)
    assert torch.equal(model.state_dict()["layer.weight"], start - 0.25)
    assert_masters_agree(model, optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [new]})


@LEVEL
def test_a_float32_one_is_named_where_the_forward_fails(level):
    model, _optimizer = started(level, One)
    model.layer.weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="dtype|type") as found:
        model(torch.ones(1, 4))
    said = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])  # Python 3.10 has no notes
    assert "'weight' of a Linear is torch.float32" in said


@LEVEL
def test_initialize_after_a_replacement_keeps_its_values(level):
    model, _optimizer = started(level, One)
    new = nn.Parameter(torch.randn(4, 4) / 3)
    values = new.detach().clone()
    model.layer.weight = new
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, verbosity=0, loss_scale=8.0
    )
    assert torch.equal(model.state_dict()["layer.weight"], values)
    step(model, optimizer)
    assert torch.equal(model.state_dict()["layer.weight"], values - 0.5)


@LEVEL
def test_tied_weights_stay_tied_when_parameters_are_assigned(level):
    """``load_state_dict(assign=True)`` puts parameters in place, too, which the optimizer goes on with."""
    model, optimizer = started(level)
    want = {name: torch.full_like(value, 1 / 3) for name, value in model.state_dict().items()}
    model.load_state_dict(want, assign=True)
    assert model.encoder.weight is model.decoder.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name])
    step(model, optimizer)
    assert not torch.equal(model.state_dict()["encoder.weight"], want["encoder.weight"])
    assert_masters_agree(model, optimizer)


@LEVEL
def test_what_fully_shard_has_sharded_too_late_is_refused(level, monkeypatch):
    model, optimizer = started(level, One)
    model.layer.weight = new_parameter(level)
    monkeypatch.setattr("ampcompat._torch.is_sharded", lambda tensor: tensor is model.layer.weight)
    for ask in (model.state_dict, lambda: amp.initialize(model, optimizer, opt_level=level, verbosity=0)):
        with pytest.raises(RuntimeError, match="call fully_shard before the optimizer is made"):
            ask()
