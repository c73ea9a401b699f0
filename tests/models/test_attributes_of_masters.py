"""What a script has put on a parameter, and what an optimizer reads there, is on its master too."""

import copy
import io
import pickle

import pytest
import torch
from amp_training import make_step
from internals import master_of
from nets import MASTER_LEVELS

from ampcompat import amp

LEVELS = ["O0", "O1", *MASTER_LEVELS]


class ScaledSGD(torch.optim.SGD):
    """Steps each parameter with its own rate, as optimizers of public scripts do (``p.lr_mult``)."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] * getattr(param, "lr_mult", 1.0))


class OnSphere(torch.nn.Parameter):
    """A parameter on a manifold: its class and an attribute tell the optimizer, as geoopt's do."""

    max_norm = 4.0

    def __new__(cls, data, radius=1.0):
        param = super().__new__(cls, data)
        param.radius = radius
        return param

    def __deepcopy__(self, memo):
        memo[id(self)] = clone = type(self)(self.data.clone(), self.radius)
        return clone

    def __reduce_ex__(self, protocol):
        return type(self), (self.data, self.radius)


class Sphere(ScaledSGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, OnSphere):
                    radius = min(param.radius, param.max_norm)
                    param.data.mul_(radius / param.data.norm())


def two_layers():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    return model


def step(model, optimizer):
    make_step(optimizer, model(torch.ones(2, 4)).float().sum())


def started(model, optimizer, level):
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_with_a_rate_of_0_does_not_move(level, when):
    model = two_layers()
    optimizer = ScaledSGD(model.parameters(), lr=0.5)
    if when == "before":
        model[0].weight.lr_mult = 0.0
    model, optimizer = started(model, optimizer, level)
    before = weights(model)
    if when == "after":
        model[0].weight.lr_mult = 0.0
    step(model, optimizer)
    after = weights(model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.weight"], after["1.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_attribute_of_the_master_is_the_weights(level):
    """An optimizer that notes something on a parameter, and a script that reads it from the model."""
    model = two_layers()
    model, optimizer = started(model, torch.optim.SGD(model.parameters(), lr=0.5), level)
    for index, param in enumerate(amp.master_params(optimizer)):
        param.place = index
    assert [param.place for param in model.parameters()] == [0, 1, 2, 3]


@pytest.mark.parametrize("level", LEVELS)
def test_a_manifold_is_kept(level):
    model = two_layers()
    model[0].weight = OnSphere(model[0].weight.detach(), radius=2.0)
    model, optimizer = started(model, Sphere(model.parameters(), lr=0.5), level)
    (first, *rest) = amp.master_params(optimizer)
    assert isinstance(first, OnSphere)
    assert type(first.data) is torch.Tensor
    assert {type(param) for param in rest} == {torch.nn.Parameter}  # torch's fast paths compare the type
    for _ in range(3):
        step(model, optimizer)
        assert float(weights(model)["0.weight"].norm()) == pytest.approx(2.0, abs=1e-6)


def deep_copied(objects):
    return copy.deepcopy(objects)


def pickled(objects):
    return pickle.loads(pickle.dumps(objects))


def saved_by_torch(objects):
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [deep_copied, pickled, saved_by_torch])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_copies_have_the_class_and_share_their_attributes(level, copied):
    model = two_layers()
    model[0].weight = OnSphere(model[0].weight.detach(), radius=2.0)
    model, _optimizer = started(model, torch.optim.SGD(model.parameters(), lr=0.5), level)
    clone = copied(model)
    half = clone[0].weight
    master = master_of(half)
    assert type(half) is type(master.value) is OnSphere
    assert master.value is not master_of(model[0].weight).value
    half.radius = 3.0
    assert master.value.radius == 3.0
    assert model[0].weight.radius == 2.0


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_attributes_outlive_a_change_of_level(level):
    model = two_layers()
    optimizer = ScaledSGD(model.parameters(), lr=0.5)
    model[0].weight.lr_mult = 0.0
    before = weights(model)
    for other in (level, "O0", "O1", level):
        model, optimizer = started(model, optimizer, other)
        step(model, optimizer)
    after = weights(model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["1.weight"], after["1.weight"])


class WithSlots(torch.nn.Parameter):
    __slots__ = ("note",)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_class_with_another_layout_in_memory_stays_the_weights_alone(level):
    model = two_layers()
    model[0].weight = WithSlots(model[0].weight.detach())
    model[0].weight.lr_mult = 0.0
    model, optimizer = started(model, ScaledSGD(model.parameters(), lr=0.5), level)
    before = weights(model)
    step(model, optimizer)
    assert torch.equal(before["0.weight"], weights(model)["0.weight"])


# -- whether a weight is trained ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
def test_a_clip_covers_layers_that_were_unfrozen(level):
    """Gradual unfreezing: the parameters to clip are chosen anew at each step."""
    model = two_layers()
    model[0].requires_grad_(False)
    model, optimizer = started(model, torch.optim.SGD(model.parameters(), lr=0.5), level)
    step(model, optimizer)
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        trained = [param for param in amp.master_params(optimizer) if param.requires_grad]
        assert len(trained) == (2 if frozen else 4)
        assert float(torch.nn.utils.clip_grad_norm_(trained, 0.5)) > 0.5
        gradients = [param.grad for param in amp.master_params(optimizer) if param.grad is not None]
        assert float(torch.cat([grad.flatten() for grad in gradients]).norm()) == pytest.approx(0.5, rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
