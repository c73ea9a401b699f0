"""Mistakes that plain torch would not notice: each is warned of once, with its fix; what only looks like one is not."""

import warnings

import pytest
import torch
from amp_training import backward, loss_of, start, train
from internals import is_watched
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from ampcompat import amp
from ampcompat.amp.misuse import WATCHED
from ampcompat.parallel import LARC


def warnings_of(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return found


def warned(act):
    """The messages of what ``act()`` warns of."""
    return [str(warning.message) for warning in warnings_of(act)]


# -- mistakes ----------------------------------------------------------------------------------------------------------
def backward_of_the_loss_in_the_block(model, optimizer):
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def backward_after_the_block(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    scaled.backward()
    model.zero_grad()


def without_a_backward(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer):
        pass
    optimizer.step()


def without_a_block(model, optimizer):
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_a_block_but_clipped(model, optimizer):
    loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def without_a_block_after_steps_with_blocks(model, optimizer):
    train(model, optimizer, 2)
    without_a_block(model, optimizer)


def clipping_half_gradients(model, optimizer):
    backward(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def assigning_half_gradients(model, optimizer):
    backward(model, optimizer)
    for param in model.parameters():
        param.grad = param.grad * 0.5
    optimizer.step()
    optimizer.zero_grad()


def a_second_backward_after_the_block(model, optimizer):
    backward(model, optimizer)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()


def an_optimizer_that_amp_does_not_know(model, optimizer):
    """Of half weights that another has masters of; its first step makes it known to the watch."""
    unknown = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        backward(model, optimizer)
        unknown.step()
        optimizer.step()
        optimizer.zero_grad()


def replaced_backward_method(model, optimizer):
    optimizer._post_amp_backward = lambda scaler: None
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


LOSS = "A scale_loss block whose scaled loss got no backward() in it - "
LOSS_FIX = "call backward() on what the block yields, not on the loss, and inside the block."
NO_BLOCK = "optimizer.step() with gradients, but no scale_loss block of this optimizer since its last step - "
NO_BLOCK_FIX = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`."
EDITED = "Gradients of the model's half parameters changed after scale_loss (clipped, assigned, or a second backward()"
EDITED_FIX = "give each loss a block of its own, or add the losses up."
UNKNOWN = "SGD.step() with gradients that a scale_loss block has left multiplied by the loss scale - "
UNKNOWN_FIX = "or call its zero_grad() before the backward pass of its own loss."
REPLACED = "optimizer._prepare_amp_backward or _post_amp_backward was replaced - "
REPLACED_FIX = "or call it in a scale_loss of your own."
MISTAKES = {
    backward_of_the_loss_in_the_block: (["O1", "O2"], LOSS, LOSS_FIX),
    backward_after_the_block: (["O1", "O2"], LOSS, LOSS_FIX),
    without_a_backward: (["O1", "O2"], LOSS, LOSS_FIX),
    without_a_block: (["O2", "O5"], NO_BLOCK, NO_BLOCK_FIX),
    without_a_block_but_clipped: (["O2", "O5"], NO_BLOCK, NO_BLOCK_FIX),
    without_a_block_after_steps_with_blocks: (["O2", "O5"], NO_BLOCK, NO_BLOCK_FIX),
    clipping_half_gradients: (["O2", "O5"], EDITED, EDITED_FIX),
    assigning_half_gradients: (["O2", "O5"], EDITED, EDITED_FIX),
    a_second_backward_after_the_block: (["O2", "O5"], EDITED, EDITED_FIX),
    an_optimizer_that_amp_does_not_know: (["O2"], UNKNOWN, UNKNOWN_FIX),
    replaced_backward_method: (["O1", "O2"], REPLACED, REPLACED_FIX),
}
CASES = [(level, act) for act, (levels, *_) in MISTAKES.items() for level in levels]


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize(("level", "act"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_a_mistake_is_named_once_with_its_fix(level, act, loss_scale):
    model, optimizer = start(level, **({} if level == "O5" else {"loss_scale": loss_scale}))
    _, beginning, end = MISTAKES[act]
    (message,) = warned(lambda: act(model, optimizer))
    assert message.startswith(beginning)
    assert message.endswith(end)
    assert warned(lambda: act(model, optimizer)) == []


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("act", MISTAKES, ids=lambda v: v.__name__)
def test_the_warning_points_at_the_script(act, scheduled):
    model, optimizer = start("O2")
    if scheduled:  # it wraps step(), and some libraries ignore what is warned of from its file
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (warning,) = warnings_of(lambda: act(model, optimizer))
    assert warning.filename in (__file__, backward.__code__.co_filename)


@pytest.mark.cover(1)
@pytest.mark.parametrize(("level", "options"), [("O0", {}), ("O1", {"loss_scale": 1.0}), ("O3", {}), ("O4", {})])
@pytest.mark.parametrize("act", MISTAKES, ids=lambda v: v.__name__)
def test_at_a_scale_of_one_without_masters_nothing_is_a_mistake(level, options, act):
    model, optimizer = start(level, **options)
    assert warned(lambda: act(model, optimizer)) == []


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("act", [without_a_block, clipping_half_gradients, a_second_backward_after_the_block])
def test_without_masters_no_gradient_of_the_model_is_a_mistake(level, act):
    """Optimizers step with it."""
    model, optimizer = start(level, loss_scale=128.0)
    assert warned(lambda: act(model, optimizer)) == []


@pytest.mark.parametrize(("level", "trains"), [("O1", True), ("O2", False), ("O5", False)])
def test_a_plain_backward_gives_masters_no_gradient(level, trains):
    """As under apex, but with a warning."""
    model, optimizer = start(level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    assert len(warned(lambda: without_a_block(model, optimizer))) == (not trains)
    after = list(amp.master_params(optimizer))
    assert torch.equal(before[0], after[0]) is not trains


# -- what looks like a mistake -----------------------------------------------------------------------------------------
def clip_masters(model, optimizer):
    backward(model, optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()


def clip_model_in_the_block(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    optimizer.step()


def accumulate(model, optimizer):
    for part in range(3):
        backward(model, optimizer, part)
    optimizer.step()


def accumulate_in_delayed_blocks(model, optimizer):
    for part in range(3):
        backward(model, optimizer, part, delay_unscale=part < 2)
    optimizer.step()


def clear_gradients_between_blocks(model, optimizer):
    """Of an adversarial example's loss."""
    backward(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()


def let_the_model_clear_gradients(model, optimizer):
    backward(model, optimizer)
    optimizer.step()
    model.zero_grad()


def zero_gradients(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    backward(model, optimizer)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    optimizer.step()


def zero_gradients_of_a_block(model, optimizer):
    """Before another block, and before a step."""
    for one in (optimizer, model):
        backward(model, optimizer)
        one.zero_grad(set_to_none=False)
        backward(model, optimizer)
        one.zero_grad(set_to_none=False)
        optimizer.step()


class Forwards:
    """An object around an optimizer, as training frameworks have them."""

    def __init__(self, optimizer):
        self.wrapped = optimizer

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


def an_object_that_forwards_to_the_optimizer(model, optimizer):
    outer = Forwards(optimizer)
    for optimizers in (outer, [outer]):
        backward(model, optimizers)
        outer.step()
        outer.zero_grad()
        assert not amp.step_was_skipped(outer)


def gradients_of_the_scripts_own(model, optimizer):
    """Of Reptile, evolution strategies: not of a loss."""
    for param in amp.master_params(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()


def gradients_of_autograd_grad(model, optimizer):
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    for param, grad in zip(amp.master_params(optimizer), found, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def autograd_grad_in_the_block(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        torch.autograd.grad(scaled, list(model.parameters()))
    optimizer.step()


def copied_cleared_and_brought_back(model, optimizer):
    """As PCGrad and GEM do, with the gradients that the optimizer steps with."""
    backward(model, optimizer)
    projected = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.zero_grad()
    for param, grad in zip(amp.master_params(optimizer), projected, strict=True):
        param.grad = grad
    optimizer.step()


def no_gradients_at_all(model, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def more_than_the_scaled_loss(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        (scaled + scaled.detach() * sum(p.float().sum() for p in model.parameters()) * 0).backward()
    optimizer.step()


def a_loss_without_a_graph(model, optimizer):
    with amp.scale_loss(loss_of(model).detach(), optimizer):
        pass
    optimizer.step()


def a_block_that_raises(model, optimizer):
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
        raise ZeroDivisionError
    optimizer.step()


def gradients_kept_for_a_second_step(model, optimizer):
    backward(model, optimizer)
    optimizer.step()
    optimizer.step()


def a_scale_loss_of_the_scripts_own(model, optimizer):
    """A copy of apex's, over the methods that it put on optimizers."""
    scaler = amp._amp_state.loss_scalers[0]
    optimizer._prepare_amp_backward()
    (loss_of(model).float() * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    scaler.update_scale()
    optimizer.step()


RIGHT = [
    clip_masters,
    clip_model_in_the_block,
    accumulate,
    accumulate_in_delayed_blocks,
    clear_gradients_between_blocks,
    let_the_model_clear_gradients,
    zero_gradients,
    zero_gradients_of_a_block,
    an_object_that_forwards_to_the_optimizer,
    gradients_of_the_scripts_own,
    gradients_of_autograd_grad,
    autograd_grad_in_the_block,
    copied_cleared_and_brought_back,
    no_gradients_at_all,
    more_than_the_scaled_loss,
    a_loss_without_a_graph,
    a_block_that_raises,
    gradients_kept_for_a_second_step,
    a_scale_loss_of_the_scripts_own,
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("act", RIGHT, ids=lambda v: v.__name__)
def test_right_use_is_not_warned_of(level, act):
    model, optimizer = start(level)
    for _ in range(3):
        assert warned(lambda: act(model, optimizer)) == []
        optimizer.zero_grad()
    train(model, optimizer, 1)


@pytest.mark.parametrize("clears", [None, "none", "zeros", "by hand", "zeros by hand"])
def test_a_loop_that_clears_gradients_in_any_way_or_not_at_all(clears):
    model, optimizer = start("O2")
    if clears is not None:
        loss_of(model).backward()  # to look for a learning rate, say

    def loop():
        for seed in range(4):
            if clears in ("none", "zeros"):
                model.zero_grad(clears == "none")
            if clears == "by hand":
                for p in model.parameters():
                    p.grad = None
            if clears == "zeros by hand" and not seed:
                for p in model.parameters():
                    p.grad.zero_()
            backward(model, optimizer, seed)
            optimizer.step()

    assert warned(loop) == []


def test_a_script_keeps_the_list_of_masters_that_it_writes_gradients_to():
    model, optimizer = start("O2")
    params = list(amp.master_params(optimizer))

    def steps():
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

    assert warned(steps) == []
    optimizer.zero_grad()
    (message,) = warned(lambda: without_a_block(model, optimizer))
    assert message.startswith(NO_BLOCK)


# -- several optimizers ------------------------------------------------------------------------------------------------
class Gan:
    """A generator and a discriminator, each with an optimizer; blocks of either loss."""

    def __init__(self, level):
        torch.manual_seed(0)
        nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        (self.g, self.d), (self.for_g, self.for_d) = amp.initialize(nets, optimizers, opt_level=level, verbosity=0)
        self.x = torch.randn(8, 4)

    def train_d(self, detach=True):
        made = self.g(self.x)
        with amp.scale_loss(self.d(made.detach() if detach else made).mean(), self.for_d) as scaled:
            scaled.backward()

    def train_g(self, optimizers=None):
        with amp.scale_loss(-self.d(self.g(self.x)).mean(), optimizers or self.for_g) as scaled:
            scaled.backward()


def each_clears_before_its_loss(gan):
    gan.d.zero_grad()
    gan.train_d()
    gan.for_d.step()
    gan.g.zero_grad()
    gan.train_g()
    gan.for_g.step()


def the_loss_of_d_goes_through_g(gan):
    gan.for_d.zero_grad()
    gan.train_d(detach=False)
    gan.for_d.step()
    gan.for_g.zero_grad()
    gan.train_g()
    gan.for_g.step()


def the_step_of_d_is_left_out(gan):
    """Where the discriminator is too good; what the generator's loss has left in it is cleared."""
    gan.for_d.zero_grad()
    gan.train_d()
    gan.for_g.zero_grad()
    gan.train_g()
    gan.for_g.step()


def d_is_frozen_for_the_loss_of_g(gan):
    gan.for_d.zero_grad()
    gan.train_d()
    gan.d.requires_grad_(False)
    gan.for_g.zero_grad()
    gan.train_g()
    gan.d.requires_grad_(True)
    gan.for_d.step()
    gan.for_g.step()


def one_block_of_both(gan):
    for optimizer in (gan.for_d, gan.for_g):
        optimizer.zero_grad()
    gan.train_g([gan.for_g, gan.for_d])
    gan.for_d.step()
    gan.for_g.step()


def a_block_in_a_block(gan):
    for optimizer in (gan.for_d, gan.for_g):
        optimizer.zero_grad()
    with amp.scale_loss(gan.g(gan.x).mean(), gan.for_g) as scaled:
        gan.train_d()
        scaled.backward()
    gan.for_d.step()
    gan.for_g.step()


GANS = [
    each_clears_before_its_loss,
    the_loss_of_d_goes_through_g,
    the_step_of_d_is_left_out,
    d_is_frozen_for_the_loss_of_g,
    one_block_of_both,
    a_block_in_a_block,
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("rounds", GANS, ids=lambda v: v.__name__)
def test_a_gan_is_not_warned_of(level, rounds):
    gan = Gan(level)
    for _ in range(3):
        assert warned(lambda: rounds(gan)) == []


# -- optimizers that amp does not know ---------------------------------------------------------------------------------
class HalfKnown:
    """A GAN whose discriminator's optimizer was not given to ``initialize``."""

    def __init__(self, level, optimizer=torch.optim.SGD, **kwargs):
        torch.manual_seed(0)
        self.g, self.d = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.for_g = torch.optim.SGD(self.g.parameters(), lr=0.1)
        amp.initialize([self.g, self.d], self.for_g, opt_level=level, verbosity=0, **kwargs)
        self.for_d = optimizer(self.d.parameters(), lr=0.1)
        self.x = torch.randn(8, 4)

    def block(self):
        with amp.scale_loss(self.d(self.g(self.x)).float().mean(), self.for_g) as scaled:
            scaled.backward()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_amp_does_not_know(level, optimizer):
    """Its weights move 65,536 times too far, under apex too."""
    gan = HalfKnown(level, optimizer, loss_scale="dynamic")

    def train():
        for _ in range(2):
            gan.block()
            gan.for_d.step()

    (warning,) = warnings_of(train)
    assert str(warning.message).startswith(f"{optimizer.__name__}.step() with gradients that a scale_loss block has")
    assert warning.filename == __file__
    assert warned(train) == []


def clears_first(gan):
    gan.for_d.zero_grad()
    gan.d(gan.x).float().mean().backward()


def zeroes_first(gan):
    gan.for_d.zero_grad(set_to_none=False)
    gan.d(gan.x).float().mean().backward()


def unscales_by_hand(gan):
    for param in gan.d.parameters():
        param.grad.div_(amp.state_dict()["loss_scaler0"]["loss_scale"])


def has_a_grad_scaler_of_its_own(gan):
    gan.for_d.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(gan.d(gan.x).float().mean()).backward()
    scaler.unscale_(gan.for_d)


def is_given_to_amp(gan):
    gan.for_d.zero_grad()
    amp.initialize(gan.d, gan.for_d, opt_level="O1", verbosity=0)
    with amp.scale_loss(gan.d(gan.x).float().mean(), gan.for_d) as scaled:
        scaled.backward()


def takes_it_out_of_amp(gan):
    gan.for_d.zero_grad()
    amp.initialize(gan.d, gan.for_d, enabled=False)
    gan.d(gan.x).mean().backward()


@pytest.mark.parametrize(
    "before_step",
    [
        clears_first,
        zeroes_first,
        unscales_by_hand,
        has_a_grad_scaler_of_its_own,
        is_given_to_amp,
        takes_it_out_of_amp,
    ],
)
def test_an_optimizer_that_amp_does_not_know_with_gradients_of_its_own(before_step):
    gan = HalfKnown("O1")

    def train():
        for _ in range(2):
            gan.block()
            before_step(gan)
            gan.for_d.step()

    assert warned(train) == []


def test_gradients_of_an_unknown_optimizer_that_a_script_keeps():
    """Two gradients of one parameter are alive: those from before the block, and new ones."""
    gan = HalfKnown("O1")
    kept = []

    def train():
        for _ in range(3):
            with amp.scale_loss(gan.d(gan.g(gan.x)).float().mean(), gan.for_g) as scaled:
                kept.extend(p.grad for p in gan.d.parameters())
                gan.for_d.zero_grad()
                scaled.backward()
            gan.for_d.step()

    (message,) = warned(train)
    assert message.startswith(UNKNOWN)


def test_an_optimizer_of_a_model_that_amp_does_not_have():
    model, optimizer = start("O1")
    other = torch.nn.Linear(6, 6)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    x = torch.ones(4, 6)

    def train():
        for _ in range(2):
            with amp.scale_loss(model(other(x)).float().mean(), optimizer) as scaled:
                scaled.backward()
            plain.step()
            optimizer.step()

    (message,) = warned(train)
    assert message.startswith(UNKNOWN)


@pytest.mark.parametrize(("level", "kwargs"), [("O0", {}), ("O4", {}), ("O1", {"loss_scale": 1.0})])
def test_where_the_scale_is_one_no_unknown_optimizer_is_warned_of(level, kwargs):
    gan = HalfKnown(level, **kwargs)

    def train():
        gan.block()
        gan.for_d.step()

    assert warned(train) == []


class Around(torch.optim.Optimizer):
    """Holds the weights of its own, and steps by another optimizer: as slow weights do."""

    def __init__(self, model, inner):
        super().__init__(model.parameters(), {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_around_one_that_amp_knows(level):
    model, optimizer = start(level, loss_scale=128.0)
    outer = Around(model, optimizer)

    def train():
        backward(model, optimizer)
        outer.step()

    assert warned(train) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_inside_one_that_amp_knows(level):
    model, optimizer = start(level, lambda model: LARC(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert warned(lambda: train(model, optimizer)) == []


# -- how long it watches -----------------------------------------------------------------------------------------------
def test_more_blocks_are_watched_for_more_losses():
    model, optimizer = start("O1", num_losses=2)
    train(model, optimizer, WATCHED)

    def second():
        with amp.scale_loss(loss_of(model), optimizer, loss_id=1):
            pass

    (message,) = warned(second)
    assert message.startswith(LOSS)
    train(model, optimizer, WATCHED - 1)
    assert not is_watched()


def test_only_the_first_losses_carry_a_hook():
    """A hook costs a tenth of a millisecond of every backward pass."""
    model, optimizer = start("O1")
    carried = []
    for _ in range(WATCHED + 4):
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            carried.append(bool(scaled._backward_hooks))
            scaled.backward()
        optimizer.step()
    assert carried == [True] * WATCHED + [False] * 4


@pytest.mark.parametrize("act", [clipping_half_gradients, without_a_backward])
def test_the_step_after_the_last_block_is_watched(act):
    model, optimizer = start("O2")
    train(model, optimizer, WATCHED - 1)
    (message,) = warned(lambda: act(model, optimizer))
    assert message.startswith(MISTAKES[act][1])
    assert not is_watched()


def test_the_hook_of_steps_goes_with_the_watch():
    before = len(hooks)
    model, optimizer = start("O1")
    assert len(hooks) == before + 1
    train(model, optimizer, WATCHED)
    assert len(hooks) == before


def test_blocks_that_scale_nothing_are_counted():
    """The watch over another session ends with them."""
    start("O1")
    model, optimizer = start("O4")
    for _ in range(WATCHED):
        assert is_watched()
        train(model, optimizer, 1)
    assert not is_watched()
