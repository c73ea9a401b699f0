"""An exception or Ctrl-C at any line of ours leaves a call undone or done, never half."""

import pytest
import torch
from fault_kit import interrupt, lines_of, make_torch_whole, strikes, sweep, whole_picture

from ampcompat import amp
from ampcompat._state import state
from ampcompat._torch import autocast_nesting
from ampcompat.amp.accumulation import rescale
from ampcompat.amp.backward_pass import finish_delayed
from ampcompat.amp.casts import cast_state


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


def slow(*values):
    """A case of the nightly runs: its lines are struck by the others too."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("opt_level", "blocks"),
    [("O1", 0), ("O2", 1), ("O3", 0)]
    + [slow(*case) for case in (("O0", 0), ("O0", 1), ("O1", 1), ("O2", 0), ("O5", 1))],
)
def test_forward_and_scale_loss(every, opt_level, blocks):
    sweep(ready(opt_level, blocks=blocks, loss_scale="dynamic"), World.block, look, every)


def test_scale_loss_with_an_overflow(every):
    sweep(ready("O2", overflow=True), World.block, look, every)


@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
def test_scale_loss_delayed(every, delay):
    sweep(ready("O2", blocks=1), lambda world: world.block(**{delay: True}), look, every)


@pytest.mark.parametrize("opt_level", ["O2", slow("O0"), slow("O1"), slow("O3")])
def test_scale_loss_after_a_delayed_block(every, opt_level):
    def make():
        world = ready(opt_level, loss_scale="dynamic")()
        world.block(delay_unscale=True)
        return world

    sweep(make, World.block, look, every)


@pytest.mark.parametrize("make_optimizer", [sgd, fused, slow(adam)])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_step(every, opt_level, overflow, make_optimizer):
    def make():
        world = ready(opt_level, make_optimizer, overflow=overflow)()
        world.block()
        return world

    sweep(make, lambda world: world.optimizer.step(), look, every)


@pytest.mark.parametrize(("opt_level", "blocks"), [("O2", 1), ("O1", 1), slow("O2", 0), slow("O1", 0)])
def test_step_after_a_delayed_block(every, opt_level, blocks):
    def make():
        world = ready(opt_level, blocks=blocks)()
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


@pytest.mark.parametrize(
    ("before", "after"), [("O1", "O2"), ("O2", "O0"), slow("O2", "O1"), slow("O2", "O3"), slow("O3", "O2")]
)
def test_initialize_again(every, before, after):
    sweep(ready(before), lambda world: initialize(world, after, num_losses=2), look, every)


def test_initialize_disabled(every):
    sweep(lambda: World(sgd), lambda world: initialize(world, "O2", enabled=False), look, every)


@pytest.mark.parametrize("opt_level", ["O2", slow("O1")])
def test_initialize_disabled_later(every, opt_level):
    sweep(ready(opt_level), lambda world: initialize(world, "O2", enabled=False), look, every)


def test_casts_taken_back(every):
    sweep(ready("O1"), lambda world: amp._amp_state.handle._deactivate(), look, every)


def test_reset(every):
    sweep(ready("O1"), lambda world: state.reset(), look, every)


def raising_block(world):
    """A block that the script itself leaves by an exception."""
    try:
        with amp.scale_loss(world.loss(), world.optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_leaving_a_block_by_an_exception(every, opt_level):
    sweep(ready(opt_level, blocks=1), raising_block, look, every)


@pytest.mark.parametrize("opt_level", ["O1", slow("O2")])
def test_leaving_a_block_by_an_exception_while_gradients_wait(every, opt_level):
    def make():
        world = ready(opt_level, blocks=1)()
        world.block(delay_unscale=True)
        return world

    sweep(make, raising_block, look, every)


class TwoOptimizers(World):
    """One loss, and an optimizer for each half of the model; the first layer belongs to both."""

    def __init__(self):
        super().__init__(sgd)
        self.optimizer = torch.optim.SGD([*self.model[0].parameters(), *self.model[1].parameters()], lr=0.1)
        self.other = torch.optim.Adam([*self.model[2].parameters(), *self.model[0].parameters()], lr=0.01)
        amp.initialize(self.model, [self.optimizer, self.other], opt_level="O2", num_losses=2, verbosity=0)
        self.block(loss_id=1)

    def block(self, **kwargs):
        with amp.scale_loss(self.loss(), [self.optimizer, self.other], **kwargs) as scaled:
            scaled.backward()


def look_at_two(world):
    return whole_picture([world.model], [world.optimizer, world.other])


def test_a_block_of_two_optimizers(every):
    sweep(TwoOptimizers, TwoOptimizers.block, look_at_two, every)


def test_step_of_one_of_two_optimizers_after_a_delayed_block(every):
    def make():
        world = TwoOptimizers()
        world.block(delay_unscale=True)
        return world

    sweep(make, lambda world: world.optimizer.step(), look_at_two, every, between=unscale_delayed)


def test_gradients_of_no_sync_brought_to_another_scale(every):
    def make():
        world = TwoOptimizers()
        world.block(delay_unscale=True)
        for one in (world.optimizer, world.other):
            one._amp_stash.gradients_are_local = True
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
        return world

    def bring(world):
        rescale([world.optimizer, world.other], amp._amp_state.loss_scalers[0])

    sweep(make, bring, lambda world: {**look_at_two(world), "at": waiting_at(world)}, every)


def waiting_at(world):
    return [one._amp_stash.waiting.scale.item() for one in (world.optimizer, world.other)]


class Sparse(World):
    """An embedding whose gradients are sparse: some rows, some of them twice."""

    def __init__(self, opt_level):
        super().__init__(sgd)
        self.model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)).eval()
        self.x = torch.tensor([0, 3, 3])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        amp.initialize(self.model, self.optimizer, opt_level=opt_level, verbosity=0)
        self.block()


@pytest.mark.parametrize("opt_level", ["O2", slow("O1")])
def test_sparse_gradients(every, opt_level):
    sweep(lambda: Sparse(opt_level), Sparse.block, look, every)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(every, opt_level, set_to_none):
    def clear(world):
        world.optimizer.zero_grad(set_to_none=set_to_none)

    sweep(ready(opt_level, blocks=1), clear, look, every)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_add_param_group(every, opt_level):
    def make():
        world = World(lambda params: sgd(list(params)[:4]))
        initialize(world, opt_level)
        world.block()
        return world

    def add(world):
        world.optimizer.add_param_group({"params": list(world.model[2].parameters()), "lr": 1.0})

    sweep(make, add, look, every)


def values(world):
    """Where a closure is interrupted, its backward passes have happened: what the step moves must be whole."""
    return {key: value for key, value in look(world).items() if "grad" not in key and key not in ("scalers", *STASH)}


STASH = ("optimizer 0 stash", "optimizer 0 aside")


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


@pytest.mark.parametrize("make_optimizer", [sgd, slow(lbfgs)])
@pytest.mark.parametrize("opt_level", ["O2", slow("O1")])
def test_step_with_a_closure(every, opt_level, make_optimizer):
    def step(world):
        def closure():
            world.optimizer.zero_grad()
            world.block()
            return world.loss()

        world.optimizer.step(closure)

    sweep(ready(opt_level, make_optimizer, steps=0), step, values, every)


def test_disable_casts(every):
    def call(world):
        with amp.disable_casts(), amp.disable_casts():
            world.loss()

    sweep(ready("O1"), call, look, every)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_model_state_dict(every, opt_level):
    sweep(ready(opt_level, blocks=1), lambda world: world.model.state_dict(), look, every)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("opt_level", ["O2", "O3"])  # at the others no line of ours runs
@pytest.mark.filterwarnings("ignore:Parameter .* was replaced:UserWarning")
def test_model_load_state_dict(every, opt_level, assign):
    """torch loads tensor by tensor: each is as before or as after, and the call, repeated, makes the model whole."""
    torch.manual_seed(1)
    incoming = {name: torch.rand_like(t) for name, t in World(sgd).model.state_dict().items() if t.is_floating_point()}
    make = ready(opt_level, blocks=1)

    def load(world):
        copies = {name: tensor.clone() for name, tensor in incoming.items()}
        world.model.load_state_dict(copies, strict=False, assign=assign)

    def tensors(world):
        world.loss()  # a forward makes masters and half weights agree
        found = world.model.state_dict()
        if assign:  # an assigned tensor is the model's before its master has the low bits
            found = {name: tensor.half() for name, tensor in found.items()}
        return {name: tensor.tolist() for name, tensor in found.items()}

    def step(world):
        world.optimizer.step()
        return {name: tensor.tolist() for name, tensor in world.model.state_dict().items()}

    world = make()
    planned = strikes(lines_of(lambda: load(world)), every)
    after, stepped = tensors(world), step(world)
    before = tensors(make())
    struck = 0
    for strike in planned:
        world = make()
        struck += interrupt(lambda world=world: load(world), *strike)
        now = tensors(world)
        assert all(now[name] in (before[name], after[name]) for name in after), strike
        load(world)
        assert tensors(world) == after, strike
        assert step(world) == stepped, strike
    assert struck > 0.8 * len(planned) > 5


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_optimizer_load_state_dict_is_torchs_own(opt_level):
    world = ready(opt_level, adam)()
    saved = world.optimizer.state_dict()
    assert not lines_of(lambda: world.optimizer.load_state_dict(saved))


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


def test_a_region_of_the_user(every):
    """Its count is that of torch, wherever its entry or exit is interrupted; an interrupted entry leaves none open."""

    def call():
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
            pass

    ready("O1")()
    planned = strikes(lines_of(call), every)
    open_ones = []
    for strike in planned:
        ready("O1")()
        assert interrupt(call, *strike)
        nesting = autocast_nesting()
        assert cast_state().thread.regions.get("cpu", 0) == nesting, strike
        open_ones.append(nesting)
        make_torch_whole()
    assert open_ones.count(0) > len(planned) / 2 > 10
