"""An exception or Ctrl-C at any line of ours leaves a call undone or done, never half."""

import pytest
import torch
from fault_kit import make_torch_whole, sweep, whole_picture

from ampcompat import amp
from ampcompat._state import state
from ampcompat.amp.backward_pass import finish_delayed


class World:
    """A tiny model with batch norm, its data and its optimizer."""

    def __init__(self, make_optimizer):
        state.reset()
        make_torch_whole()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.model.eval()  # a forward pass leaves no trace: the call can be made again
        self.x = torch.randn(6, 3)
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaled = 1.0

    def loss(self):
        return self.model(self.x).float().square().mean() * self.scaled

    def block(self, **kwargs):
        with amp.scale_loss(self.loss(), self.optimizer, **kwargs) as scaled:
            scaled.backward()


def look(world):
    return whole_picture([world.model], [world.optimizer])


def sgd(params, **kwargs):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **kwargs)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def fused(params):
    return torch.optim.Adam(params, lr=0.01, fused=True)


def ready(opt_level, make_optimizer=sgd, steps=1, overflow=False, blocks=0, **kwargs):
    """Makes worlds under amp, after some steps and blocks."""

    def make():
        world = World(make_optimizer)
        amp.initialize(world.model, world.optimizer, opt_level=opt_level, verbosity=0, **kwargs)
        for _ in range(steps):
            world.block()
            world.optimizer.step()
            world.optimizer.zero_grad()
        for _ in range(blocks):
            world.block()
        if overflow:
            world.scaled = float("inf")
        return world

    return make


@pytest.fixture(params=[pytest.param(False, id="once"), pytest.param(True, id="every way", marks=pytest.mark.slow)])
def every(request):
    return request.param


LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_forward_and_scale_loss(every, opt_level, blocks):
    sweep(ready(opt_level, blocks=blocks, loss_scale="dynamic"), World.block, look, every)


def test_scale_loss_with_an_overflow(every):
    sweep(ready("O2", overflow=True), World.block, look, every)


@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
def test_scale_loss_delayed(every, delay):
    sweep(ready("O2", blocks=1), lambda world: world.block(**{delay: True}), look, every)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_scale_loss_after_a_delayed_block(every, opt_level):
    def make():
        world = ready(opt_level, loss_scale="dynamic")()
        world.block(delay_unscale=True)
        return world

    sweep(make, World.block, look, every)


@pytest.mark.parametrize("make_optimizer", [sgd, adam, fused])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_step(every, opt_level, overflow, make_optimizer):
    def make():
        world = ready(opt_level, make_optimizer, overflow=overflow)()
        world.block()
        return world

    sweep(make, lambda world: world.optimizer.step(), look, every)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_step_after_a_delayed_block(every, opt_level):
    def make():
        world = ready(opt_level)()
        world.block(delay_unscale=True)
        return world

    sweep(make, lambda world: world.optimizer.step(), look, every, between=unscale_delayed)


def unscale_delayed(world):
    finish_delayed(world.optimizer, world.optimizer._amp_stash)


def test_step_after_a_plain_backward(every):
    def make():
        world = ready("O2", loss_scale=1.0)()
        world.loss().backward()
        return world

    with pytest.warns(UserWarning, match="no scale_loss block"):
        sweep(make, lambda world: world.optimizer.step(), look, every)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_initialize(every, opt_level):
    def make():
        world = World(adam)
        world.loss().backward()
        world.optimizer.step()  # state that must be carried over
        return world

    sweep(make, lambda world: initialize(world, opt_level), look, every)


def initialize(world, opt_level, **kwargs):
    amp.initialize(world.model, world.optimizer, opt_level=opt_level, verbosity=0, **kwargs)


@pytest.mark.parametrize(("before", "after"), [("O1", "O2"), ("O2", "O1"), ("O2", "O0"), ("O2", "O3"), ("O3", "O2")])
def test_initialize_again(every, before, after):
    sweep(ready(before), lambda world: initialize(world, after, num_losses=2), look, every)


def test_initialize_disabled(every):
    sweep(lambda: World(sgd), lambda world: initialize(world, "O2", enabled=False), look, every)


SAVED = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}


def test_load_state_dict(every):
    sweep(ready("O2", num_losses=3), lambda world: amp.load_state_dict(SAVED), look, every)


def test_load_state_dict_before_initialize(every):
    sweep(lambda: World(sgd), lambda world: amp.load_state_dict(SAVED), look, every)

    def make():
        world = World(sgd)
        amp.load_state_dict(SAVED)
        return world

    sweep(make, lambda world: initialize(world, "O2", num_losses=3), look, every)
