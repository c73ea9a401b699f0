"""Parameters that a script puts in the place of half weights: added to an optimizer, untied, tied to others.

What plain torch would train, in the group that the script named, is what trains here. One thing is done for a script
that plain torch does not do: a parameter that replaces a weight altogether goes on being trained by its optimizer.
Those that are given to another optimizer are in the random programs of ``tests/laws``.
"""

import copy
import pickle
import warnings

import pytest
import torch
from internals import masters_by_name, masters_of
from nets import MASTER_LEVELS, Tied, masters_agree
from torch import nn

from ampcompat import amp

LEVEL = pytest.mark.parametrize("level", MASTER_LEVELS)
HALF = {"O2": torch.float16, "O5": torch.bfloat16}
OLD_RATE, NEW_RATE = 0.5, 0.25
REPLACED = pytest.mark.filterwarnings("ignore:Parameter '.*' of a .* was replaced after amp.initialize")
UNTIED = pytest.mark.filterwarnings("ignore:Parameter '.*' of a .* was untied after amp.initialize")


def values(seed, shape=(4, 4)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3


def started(level, kind=Tied, momentum=0.0):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=OLD_RATE, momentum=momentum)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x)


class Twice(nn.Module):
    """One parameter under two names of a module."""

    def __init__(self):
        super().__init__()
        self.left = self.right = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.left @ self.right


def forward(model):
    return model(torch.ones(1, 4))


def step(model, optimizers, **gradients):
    """A step in which each named weight gets a gradient that is exact in half; returns these."""
    forward(model)
    loss = sum((model.get_submodule(name).weight.float() * gradient).sum() for name, gradient in gradients.items())
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    with amp.scale_loss(loss, optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def held(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def new_parameter(level, wide, seed=1):
    """A parameter, and the values that its master begins with."""
    value = values(seed)
    rounded = value.to(HALF[level])
    return nn.Parameter(value.clone() if wide else rounded.clone()), value if wide else rounded.float()


# -- added to an optimizer ---------------------------------------------------------------------------------------------
def add_then_run(model, optimizer, new):
    model.layer.weight = new
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})


def run_then_add(model, optimizer, new):
    model.layer.weight = new
    with pytest.warns(UserWarning, match="was replaced after amp.initialize"):
        forward(model)
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})


def add_then_replace(model, optimizer, new):
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})
    model.layer.weight = new


def save_then_add(model, optimizer, new):
    model.layer.weight = new
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a float32 one is saved as it is, and no master asked for
        model.state_dict()
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})


@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
@pytest.mark.parametrize("add", [add_then_run, run_then_add, add_then_replace, save_then_add])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@LEVEL
def test_a_replacement_that_is_added_steps_once_in_its_group(level, momentum, add, wide):
    model, optimizer = started(level, One, momentum)
    (old,) = held(optimizer)
    gradient = torch.full((4, 4), 2.0**-6)
    step(model, optimizer, layer=gradient)
    before = old.detach().clone()
    new, value = new_parameter(level, wide)
    add(model, optimizer, new)
    for _ in range(2):
        step(model, optimizer, layer=gradient)
        step(model, optimizer, layer=gradient)
    first, second = held(optimizer)
    assert first is old
    reference = nn.Parameter(value)
    plain = torch.optim.SGD([reference], lr=NEW_RATE, momentum=momentum)
    for _ in range(4):
        reference.grad = gradient.clone()
        plain.step()
    assert model.layer.weight is new
    assert torch.equal(second, reference)
    if add is not run_then_add and (wide or add is not save_then_add):  # else it had followed the new one for a while
        assert torch.equal(first, before)
    masters_agree(model, optimizer)
    assert torch.equal(model.state_dict()["layer.weight"], second)


@LEVEL
def test_gradients_that_a_replacement_has_by_then_go_with_it(level):
    model, optimizer = started(level, One)
    (old,) = held(optimizer)
    new, value = new_parameter(level, wide=False)
    model.layer.weight = new
    with pytest.warns(UserWarning, match="was replaced after amp.initialize"):
        out = forward(model)
    with amp.scale_loss(out.sum() * 0 + (new.float() * 2.0**-6).sum(), optimizer) as scaled:
        scaled.backward()
    before = old.detach().clone()
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})
    optimizer.step()
    assert torch.equal(old, before)
    assert torch.equal(held(optimizer)[1], value - NEW_RATE * 2.0**-6)
    assert torch.equal(new, held(optimizer)[1].to(HALF[level]))


@LEVEL
def test_a_master_in_the_place_of_its_weight_is_refused(level):
    model, optimizer = started(level, One)
    model.layer.weight = held(optimizer)[0]
    with pytest.raises(RuntimeError, match="was replaced by a float32 master .* - put a copy there"):
        forward(model)
    model.layer.weight = nn.Parameter(held(optimizer)[0].detach().clone())
    with pytest.warns(UserWarning, match="was replaced after amp.initialize"):
        forward(model)
    masters_agree(model, optimizer)


@REPLACED
@LEVEL
def test_what_is_added_twice_is_refused(level):
    model, optimizer = started(level, One)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model.layer.weight]})
    for looks in (True, False):
        new, _ = new_parameter(level, wide=False)
        model.layer.weight = new
        if looks:
            forward(model)
        optimizer.add_param_group({"params": [new]})
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 3
    assert len({id(param) for param in held(optimizer)}) == 3


@REPLACED
@LEVEL
def test_a_replacement_is_added_after_one_of_its_modules_is_gone(level):
    model, optimizer = started(level)
    new, value = new_parameter(level, wide=True)
    model.encoder.weight = model.decoder.weight = new
    forward(model)
    model.decoder = nn.Identity()
    optimizer.add_param_group({"params": [new], "lr": NEW_RATE})
    gradient = torch.full((4, 4), 2.0**-6)
    step(model, optimizer, encoder=gradient)
    assert torch.equal(model.state_dict()["encoder.weight"], value - NEW_RATE * gradient)
    masters_agree(model, optimizer)


@LEVEL
def test_a_replacement_of_another_shape_can_be_added(level):
    model, optimizer = started(level, One)
    old, *_ = held(optimizer)
    model.layer.weight = nn.Parameter(values(1, (2, 4)))
    with pytest.warns(UserWarning, match="does not train the new one"):
        forward(model)
    optimizer.add_param_group({"params": [model.layer.weight], "lr": NEW_RATE})
    before = old.detach().clone()
    step(model, optimizer, layer=torch.full((2, 4), 2.0**-6))
    assert torch.equal(model.state_dict()["layer.weight"], values(1, (2, 4)) - NEW_RATE * 2.0**-6)
    assert torch.equal(old, before)


@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
@LEVEL
def test_initialize_right_after_a_replacement_keeps_its_values(level, wide):
    for again in (level, "O0"):
        model, _ = started(level, One)
        new, value = new_parameter(level, wide)
        model.layer.weight = new
        optimizer = torch.optim.SGD(model.parameters(), lr=OLD_RATE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer of the first call, if it is alive
            model, optimizer = amp.initialize(model, optimizer, opt_level=again, verbosity=0, loss_scale=8.0)
        assert torch.equal(model.state_dict()["layer.weight"], value)
        step(model, optimizer, layer=torch.full((4, 4), 2.0**-6))
        assert torch.equal(model.state_dict()["layer.weight"], value - OLD_RATE * 2.0**-6)


@REPLACED
@LEVEL
def test_a_replacement_from_a_copy_keeps_its_values(level):
    """The values that were written into the copy's half parameter, not those of its older master."""
    model, optimizer = started(level, One)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.layer.weight.fill_(1 / 3)
    want = clone.layer.weight.detach().float()
    model.layer.weight = clone.layer.weight
    forward(model)
    assert torch.equal(held(optimizer)[0], want)
    masters_agree(model, optimizer)


@REPLACED
@LEVEL
def test_a_gradient_cleared_before_a_replacement(level):
    """The step does not use it on the new parameter."""
    model, optimizer = started(level, One)
    with amp.scale_loss((forward(model) * 2.0**-6).sum(), optimizer) as scaled:
        scaled.backward()
    model.layer.weight.grad = None
    new, value = new_parameter(level, wide=False)
    model.layer.weight = new
    forward(model)
    optimizer.step()
    assert torch.equal(new, value.to(HALF[level]))


# -- untied ------------------------------------------------------------------------------------------------------------
def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@LEVEL
def test_untying_stays_and_says_that_nothing_trains_the_new_one(level, name, wide):
    model, optimizer = started(level)
    other = {"encoder": "decoder", "decoder": "encoder"}[name]
    old, exact = model.encoder.weight, model.state_dict()["encoder.weight"].clone()
    new, value = new_parameter(level, wide)
    model.get_submodule(name).weight = new
    with pytest.warns(UserWarning, match="no optimizer trains the new parameter"):
        forward(model)
    assert model.get_submodule(name).weight is new
    assert model.get_submodule(other).weight is old
    assert new.dtype == old.dtype == HALF[level]
    gradient = torch.full((4, 4), 2.0**-6)
    for _ in range(3):
        step(model, optimizer, encoder=gradient, decoder=gradient)
    saved = model.state_dict()
    assert torch.equal(saved[f"{name}.weight"], value)
    assert torch.equal(saved[f"{other}.weight"], exact - 3 * OLD_RATE * gradient)
    masters_agree(model, optimizer)


@UNTIED
@pytest.mark.parametrize("way", [copied, pickled])
@LEVEL
def test_a_copy_can_be_untied(level, way):
    model, optimizer = started(level)
    model = way(model)
    exact = model.state_dict()["encoder.weight"].clone()
    new, value = new_parameter(level, wide=True)
    model.decoder.weight = new
    for _ in range(2):
        assert torch.equal(model.state_dict()["encoder.weight"], exact)
        forward(model)
        assert model.encoder.weight is not model.decoder.weight
    assert torch.equal(model.state_dict()["decoder.weight"], value)
    for again in (way(model), amp.unwrap(model)):
        assert again.encoder.weight is not again.decoder.weight
        assert torch.equal(again.state_dict()["decoder.weight"], value)
    masters_agree(model)


@UNTIED
@pytest.mark.parametrize("name", ["left", "right"])
@LEVEL
def test_untying_two_names_of_one_module(level, name):
    model, _optimizer = started(level, Twice)
    setattr(model, name, nn.Parameter(2 * torch.eye(4)))
    for _ in range(2):
        assert torch.equal(forward(model), torch.full((1, 4), 2.0))
    assert model.left is not model.right
    assert len(masters_of(model)) == 2
    assert all(masters_by_name(model)[name].half is getattr(model, name) for name in ("left", "right"))


@REPLACED
@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
@LEVEL
def test_tied_names_can_be_replaced_together(level, wide):
    """Both names have one new parameter, which is trained."""
    model, optimizer = started(level)
    new, value = new_parameter(level, wide)
    model.encoder.weight = model.decoder.weight = new
    gradient = torch.full((4, 4), 2.0**-6)
    step(model, optimizer, encoder=gradient)
    assert model.encoder.weight is model.decoder.weight is new
    saved = model.state_dict()
    assert torch.equal(saved["encoder.weight"], value - OLD_RATE * gradient)
    assert torch.equal(saved["decoder.weight"], saved["encoder.weight"])
    masters_agree(model, optimizer)


@REPLACED
@UNTIED
@LEVEL
def test_both_names_replaced_by_two_parameters(level):
    """The first takes the place of the old one; the second is nobody's until it is added."""
    model, optimizer = started(level)
    (first, one), (second, two) = (new_parameter(level, wide=True, seed=seed) for seed in (1, 2))
    model.encoder.weight, model.decoder.weight = first, second
    gradient = torch.full((4, 4), 2.0**-6)
    step(model, optimizer, encoder=gradient, decoder=gradient)
    assert model.encoder.weight is first
    assert model.decoder.weight is second
    saved = model.state_dict()
    assert torch.equal(saved["encoder.weight"], one - OLD_RATE * gradient)
    assert torch.equal(saved["decoder.weight"], two)
    masters_agree(model, optimizer)


@UNTIED
@LEVEL
def test_loading_into_what_was_untied_writes_each_its_own(level):
    model, optimizer = started(level)
    model.decoder.weight = nn.Parameter(model.decoder.weight.detach().clone())
    wanted = {"encoder.weight": values(5), "decoder.weight": values(6)}
    for assign in (False, True):
        model.load_state_dict(wanted, assign=assign)
        forward(model)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())
        assert model.encoder.weight is not model.decoder.weight
    masters_agree(model, optimizer)


# -- tied --------------------------------------------------------------------------------------------------------------
class Apart(Tied):
    def __init__(self):
        super().__init__()
        self.decoder.weight = nn.Parameter(values(3))


@pytest.mark.filterwarnings("ignore:optimizer.step\\(\\) after scale_loss blocks that gave this optimizer no gradient")
@LEVEL
def test_tying_to_an_untrained_weight_ends_training(level):
    """No optimizer has the weight that it is tied to."""
    torch.manual_seed(0)
    for saved in (False, True):
        model = Apart()
        optimizer = torch.optim.SGD([model.decoder.weight], lr=OLD_RATE)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        if saved:
            model.state_dict()  # makes a master
        model.decoder.weight = model.encoder.weight
        before = model.encoder.weight.detach().clone()
        step(model, optimizer, encoder=torch.full((4, 4), 2.0**-6))
        assert model.encoder.weight is model.decoder.weight
        assert torch.equal(model.encoder.weight, before)
        masters_agree(model, optimizer)
