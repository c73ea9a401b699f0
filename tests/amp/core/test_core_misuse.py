"""Mistakes that plain torch would not notice: warned of once, with the fix."""

import warnings

import pytest
import torch
from core_kit import backward, loss_of, start, train
from internals import is_watched
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from ampcompat import amp
from ampcompat.amp.misuse import watch
from ampcompat.parallel import LARC


def warned(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in found]


def without_a_block(model, optimizer):
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_a_backward(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer):
        pass
    optimizer.step()
    optimizer.zero_grad()


def without_a_block_but_clipped(model, optimizer):
    loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def backward_of_the_loss_in_the_block(model, optimizer):
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def clipping_half_gradients(model, optimizer):
    backward(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


NO_BLOCK = "optimizer.step() with gradients, but no scale_loss block of this optimizer since its last step - "
NO_GRADIENT = "optimizer.step() after scale_loss blocks that gave this optimizer no gradient - "
EDITED = "Gradients of the model's half parameters changed after scale_loss (clipped, or a second backward() outside"
BLOCK = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`."
MISTAKES = {
    without_a_block: (["O1", "O2"], NO_BLOCK, BLOCK),
    without_a_block_but_clipped: (["O1", "O2"], NO_BLOCK, BLOCK),
    without_a_backward: (["O1", "O2"], NO_GRADIENT, BLOCK),
    backward_of_the_loss_in_the_block: (
        ["O1", "O2"],
        "A scale_loss block whose gradients do not come from the scaled loss - ",
        "call backward() on what the block yields, not on the loss.",
    ),
    clipping_half_gradients: (["O2"], EDITED, "give each loss a block of its own, or add the losses up."),
}
CASES = [(level, act) for act, (levels, *_) in MISTAKES.items() for level in levels]


@pytest.mark.parametrize(("level", "act"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_a_mistake_is_named_once_with_its_fix(level, act):
    model, optimizer = start(level)
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
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act(model, optimizer)
    assert [w.filename for w in found] == [__file__]


@pytest.mark.parametrize("level", ["O0", "O3"])
@pytest.mark.parametrize("act", MISTAKES, ids=lambda v: v.__name__)
def test_where_nothing_is_scaled_nothing_is_a_mistake(level, act):
    model, optimizer = start(level)
    assert warned(lambda: act(model, optimizer)) == []


UNUSED = MISTAKES[backward_of_the_loss_in_the_block][1]


def test_more_blocks_are_watched_for_more_losses():
    model, optimizer = start("O1", num_losses=2)
    for _ in range(watch.WATCHED):
        train(model, optimizer, 1)

    def second():
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer, loss_id=1):
            loss.backward()

    (message,) = warned(second)
    assert message.startswith(UNUSED)


def test_only_the_first_losses_carry_a_hook():
    """A hook costs a tenth of a millisecond of every backward pass."""
    model, optimizer = start("O1")
    hooks = []
    for _ in range(watch.WATCHED + 20):
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            hooks.append(bool(scaled._backward_hooks))
            scaled.backward()
        optimizer.step()
    assert hooks == [True] * watch.WATCHED + [False] * 20


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
        backward(model, optimizer, part, delay_unscale=part < 2)
    optimizer.step()


def input_gradient_first(model, optimizer):
    backward(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()


def model_zero_grad(model, optimizer):
    backward(model, optimizer)
    optimizer.step()
    model.zero_grad()


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


def no_gradients_at_all(model, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def more_than_the_scaled_loss(model, optimizer):
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        (scaled + scaled.detach() * sum(p.float().sum() for p in model.parameters()) * 0).backward()
    optimizer.step()


def gradients_kept_for_a_second_step(model, optimizer):
    backward(model, optimizer)
    optimizer.step()
    optimizer.step()


RIGHT = [
    clip_masters,
    clip_model_in_the_block,
    accumulate,
    input_gradient_first,
    model_zero_grad,
    an_object_that_forwards_to_the_optimizer,
    gradients_of_the_scripts_own,
    gradients_of_autograd_grad,
    no_gradients_at_all,
    more_than_the_scaled_loss,
    gradients_kept_for_a_second_step,
]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("act", RIGHT, ids=lambda v: v.__name__)
def test_right_use_is_not_warned_of(level, act):
    model, optimizer = start(level)
    for _ in range(3):
        assert warned(lambda: act(model, optimizer)) == []
        optimizer.zero_grad()
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_keeps_the_list_of_masters_that_it_writes_gradients_to(level):
    model, optimizer = start(level)
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


@pytest.mark.parametrize(("level", "trains"), [("O1", True), ("O2", False), ("O5", False)])
def test_a_plain_backward_gives_masters_no_gradient(level, trains):
    """As under apex, but with a warning."""
    model, optimizer = start(level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    assert len(warned(lambda: without_a_block(model, optimizer))) == 1
    after = list(amp.master_params(optimizer))
    assert torch.equal(before[0], after[0]) is not trains


# -- several optimizers ------------------------------------------------------------------------------------------------
class Gan:
    """A generator and a discriminator, each with an optimizer; blocks of either loss."""

    def __init__(self, level, **kwargs):
        torch.manual_seed(0)
        nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        (self.g, self.d), (self.for_g, self.for_d) = amp.initialize(
            nets, optimizers, opt_level=level, verbosity=0, **kwargs
        )
        self.x = torch.randn(8, 4)

    def train_d(self, detach=True, **kwargs):
        made = self.g(self.x)
        with amp.scale_loss(self.d(made.detach() if detach else made).mean(), self.for_d, **kwargs) as scaled:
            scaled.backward()

    def train_g(self, optimizers=None):
        with amp.scale_loss(-self.d(self.g(self.x)).mean(), optimizers or self.for_g) as scaled:
            scaled.backward()

    def train_d_in_a_block_of_g(self):
        with amp.scale_loss(self.g(self.x).mean(), self.for_g) as scaled:
            self.train_d()
            scaled.backward()


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_gradients_scaled_for_another_optimizer(loss_scale):
    """At O1 the discriminator would step with a sum of unscaled and scaled gradients, as it did under apex."""
    gan = Gan("O1", loss_scale=loss_scale)

    def steps_late():
        gan.train_d()
        gan.train_g()
        gan.for_d.step()

    (message,) = warned(steps_late)
    assert "a scale_loss block of another optimizer has added to" in message


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("detach", [True, False])
def test_the_usual_gan_is_not_warned_of(level, detach):
    gan = Gan(level)

    def loop():
        for _ in range(3):
            gan.d.zero_grad()
            gan.train_d()
            gan.train_d(detach)
            gan.for_d.step()
            gan.g.zero_grad()
            gan.train_g()
            gan.for_g.step()

    assert warned(loop) == []


BEFORE_G = {
    "stepped": lambda gan: gan.for_d.step(),
    "cleared": lambda gan: gan.for_d.zero_grad(),
    "cleared in the model": lambda gan: gan.d.zero_grad(),
    "frozen": lambda gan: gan.d.requires_grad_(False),
}


@pytest.mark.parametrize("before", BEFORE_G.values(), ids=BEFORE_G)
def test_no_gradients_scaled_for_another(before):
    gan = Gan("O1")

    def train():
        gan.train_d()
        before(gan)
        gan.train_g()
        gan.d.requires_grad_(True)
        if before is BEFORE_G["frozen"]:
            gan.for_d.step()

    assert warned(train) == []


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_step_that_is_left_out_is_not_warned_of(clear):
    """Scripts do so where the discriminator is too good; what a generator's loss has left is cleared."""
    gan = Gan("O1")

    def train():
        gan.train_d()
        gan.train_g()
        (gan.for_d if clear == "optimizer" else gan.d).zero_grad()
        gan.train_d()
        gan.for_d.step()

    assert warned(train) == []


RIGHT_TOGETHER = {
    "one block of both": lambda gan: gan.train_g([gan.for_g, gan.for_d]),
    "a block in a block": lambda gan: gan.train_d_in_a_block_of_g(),
}


@pytest.mark.parametrize("act", RIGHT_TOGETHER.values(), ids=RIGHT_TOGETHER)
def test_blocks_of_both_scale_for_none_else(act):
    gan = Gan("O1")

    def train():
        gan.train_d()
        act(gan)
        gan.for_d.step()

    assert warned(train) == []


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_where_the_scale_is_one_no_other_is_warned_of(level):
    gan = Gan(level)

    def train():
        gan.train_d()
        gan.train_g()
        gan.for_d.step()

    assert warned(train) == []


def test_gradients_that_a_script_writes_itself_after_it_cleared_those_of_a_block():
    """As PCGrad and GEM do: they keep what a block gave, clear it, and write what they have made of it."""
    model, optimizer = start("O1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            backward(model, optimizer, seed)
            projected = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            for p, grad in zip(model.parameters(), projected, strict=True):
                p.grad = grad
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_plain_backward_before_the_block(level):
    """One of two losses was forgotten; masters do not get its gradients."""
    model, optimizer = start(level)
    train(model, optimizer, 2)
    loss_of(model).backward()
    if level == "O1":
        backward(model, optimizer)
        return
    with pytest.warns(UserWarning, match=r"\(of a loss.backward\(\) before it\?\)"):
        backward(model, optimizer)


@pytest.mark.parametrize("clears", [None, "none", "zeros", "by hand", "zeros by hand"])
def test_a_loop_that_clears_gradients_in_any_way_or_not_at_all(clears):
    model, optimizer = start("O2")
    if clears is not None:
        loss_of(model).backward()  # to look for a learning rate, say
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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


def test_at_a_static_scale_a_step_without_a_block_is_named_too():
    model, optimizer = start("O1", loss_scale=128.0)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="but no scale_loss block"):
        optimizer.step()


def test_at_a_static_scale_a_second_step_with_the_same_gradients_is_plain_torchs():
    model, optimizer = start("O1", loss_scale=128.0)
    backward(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()


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
        gan.block()
        gan.for_d.step()

    (message,) = warned(train)
    assert message.startswith(
        f"{optimizer.__name__}.step() with gradients that a scale_loss block has left multiplied by"
    )
    assert "give it to amp.initialize" in message
    assert warned(train) == []


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_amp_does_not_know_of_half_weights_that_another_has_masters_of(level):
    model, optimizer = start(level, loss_scale=128.0)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, optimizer)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"SGD.step\(\) with gradients that a scale_loss block has left multiplied"):
        second.step()


def test_the_warning_of_an_unknown_optimizer_points_at_the_script():
    gan = HalfKnown("O1")
    gan.block()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gan.for_d.step()
    assert [w.filename for w in found] == [__file__]


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


def test_an_optimizer_of_a_model_that_amp_does_not_have():
    model, optimizer = start("O1")
    other = torch.nn.Linear(6, 6)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    x = torch.ones(4, 6)

    def train():
        with amp.scale_loss(model(other(x)).float().mean(), optimizer) as scaled:
            scaled.backward()
        plain.step()
        optimizer.step()

    assert warned(train) == []


@pytest.mark.parametrize(("level", "kwargs"), [("O0", {}), ("O4", {}), ("O1", {"loss_scale": 1.0})])
def test_where_the_scale_is_one_no_unknown_optimizer_is_warned_of(level, kwargs):
    gan = HalfKnown(level, **kwargs)

    def train():
        gan.block()
        gan.for_d.step()

    assert warned(train) == []


def test_a_dynamic_scale_that_has_come_down_to_one():
    gan = HalfKnown("O1")
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0

    def train():
        gan.block()
        gan.for_d.step()

    assert warned(train) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_inside_one_that_amp_knows(level):
    def make(model):
        return LARC(torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = start(level, make)
    assert warned(lambda: train(model, optimizer)) == []


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


@pytest.mark.parametrize("act", [clipping_half_gradients, without_a_backward])
def test_the_step_after_the_last_block_is_watched(act):
    model, optimizer = start("O2")
    train(model, optimizer, watch.WATCHED - 1)
    (message,) = warned(lambda: act(model, optimizer))
    assert message.startswith(MISTAKES[act][1])
    assert not is_watched()


def test_the_hook_of_steps_goes_with_the_watch():
    before = len(hooks)
    model, optimizer = start("O1")
    assert len(hooks) == before + 1
    train(model, optimizer, watch.WATCHED)
    assert len(hooks) == before


# -- what is watched ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scripts_own_scale_loss_is_a_block(level):
    """Copies of apex's, over the methods that it put on optimizers."""
    model, optimizer = start(level)
    (scaler,) = amp._amp_state.loss_scalers

    def train():
        for _ in range(2):
            optimizer._prepare_amp_backward()
            (loss_of(model).float() * scaler.loss_scale()).backward()
            optimizer._post_amp_backward(scaler)
            scaler.update_scale()
            optimizer.step()
            optimizer.zero_grad()

    assert warned(train) == []


def test_blocks_that_scale_nothing_are_counted():
    """The watch over another call of ``initialize`` ends with them."""
    start("O1")
    model, optimizer = start("O4")
    for _ in range(watch.WATCHED):
        assert is_watched()
        train(model, optimizer, 1)
    assert not is_watched()
