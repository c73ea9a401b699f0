"""Parameters that leave an optimizer and come back, and optimizers that are gone: whose gradients are still scaled.

Each gradient is 2 where it is unscaled, and 2048 where it is not; the learning rate is one.
"""

import gc

import pytest
import torch

from ampcompat import amp

SCALE = 1024.0


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(4, 3, bias=False)
        self.b = torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.a(x) + self.b(x)


def sgd(*groups):
    return torch.optim.SGD([{"params": list(group)} for group in groups], lr=1.0)


def start(level, model, optimizers):
    amp.initialize(model, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)


def block(model, optimizers, **kwargs):
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizers, **kwargs) as scaled:
        scaled.backward()


def moved(layer, steps):
    """By how much ``steps`` moves the first weight of ``layer``."""
    before = layer.weight[0, 0].item()
    steps()
    return round(before - layer.weight[0, 0].item(), 2)


def gradients(optimizer):
    return [None if p.grad is None else p.grad[0, 0].item() for p in amp.master_params(optimizer)]


LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])
DELAYS = pytest.mark.parametrize("delay_unscale", [False, True])


# -- parameters --------------------------------------------------------------------------------------------------------
@pytest.mark.cover(2)
@LEVELS
@DELAYS
@pytest.mark.parametrize("delays_next", [False, True])
def test_a_group_taken_out_and_put_back_begins_anew(level, delay_unscale, delays_next):
    model = Two()
    optimizer = sgd(model.a.parameters(), model.b.parameters())
    start(level, model, optimizer)
    block(model, optimizer, delay_unscale=delay_unscale)
    group = optimizer.param_groups.pop()
    optimizer.zero_grad()  # does not reach it
    block(model, optimizer, delay_unscale=delays_next)  # gives it scaled gradients
    optimizer.add_param_group(group)
    assert moved(model.b, optimizer.step) == 0
    optimizer.zero_grad()
    block(model, optimizer)
    assert moved(model.b, optimizer.step) == 2


@LEVELS
def test_a_parameter_appended_by_hand_begins_anew(level):
    model = Two()
    optimizer = sgd(model.a.parameters())
    start(level, model, optimizer)
    block(model, optimizer)
    optimizer.param_groups[0]["params"].append(model.b.weight)
    assert moved(model.b, optimizer.step) == 0


@LEVELS
def test_a_gradient_goes_with_its_parameter(level):
    """From one optimizer to another."""
    model = Two()
    first, second = sgd(model.parameters()), sgd([torch.nn.Parameter(torch.ones(1))])
    start(level, model, [first, second])
    block(model, [first, second])
    second.param_groups[0]["params"].append(first.param_groups[0]["params"].pop())
    first.step()
    assert moved(model.b, second.step) == 2


@LEVELS
@pytest.mark.parametrize("who", ["model", "modules"])
def test_a_layer_joins_in_the_second_stage(level, who):
    """A backbone joins the head, and gradients are cleared before each block."""
    model = Two()
    optimizer = sgd(model.a.parameters())
    start(level, model, optimizer)
    for stage in range(2):
        for module in {"model": [model], "modules": model.children()}[who]:
            module.zero_grad()
        if stage:
            optimizer.add_param_group({"params": list(model.b.parameters())})
        block(model, optimizer)
        assert moved(model.b, optimizer.step) == 2 * stage


def test_gradients_from_before_a_model_came_under_amp_stay():
    """Folds of a cross-validation, each with a look for a learning rate before ``initialize``."""
    for _ in range(2):
        model = Two()
        (model(torch.ones(2, 4)).sum() * 2).backward()
        optimizer = sgd(model.parameters())
        start("O1", model, optimizer)
        block(model, optimizer)
        assert moved(model.a, optimizer.step) == 6


@DELAYS
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_what_another_optimizer_holds_stays_when_a_group_is_taken_out(level, delay_unscale):
    model = Two()
    both, parts = sgd(model.parameters()), sgd(model.a.parameters(), model.b.parameters())
    start(level, model, [both, parts])
    block(model, [both, parts], delay_unscale=delay_unscale)
    parts.param_groups.pop()
    parts.zero_grad()
    assert moved(model.b, both.step) == 2


def test_at_a_scale_of_one_gradients_stay():
    model = Two()
    optimizer = sgd(model.a.parameters())
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    block(model, optimizer)
    optimizer.param_groups[0]["params"].append(model.b.weight)
    assert moved(model.b, optimizer.step) == 2


@LEVELS
@pytest.mark.parametrize("raises", [False, True])
def test_a_parameter_that_goes_to_another_optimizer_in_an_open_block(level, raises):
    """The block unscales what it gave gradients to, also where it fails."""
    model = Two()
    first, second = sgd(model.parameters()), sgd([torch.nn.Parameter(torch.ones(1))])
    start(level, model, [first, second])
    opened = amp.scale_loss(model(torch.ones(2, 4)).float().sum(), first)
    opened.__enter__().backward()
    second.add_param_group({"params": [first.param_groups[0]["params"].pop()]})
    opened.__exit__(*((ZeroDivisionError, ZeroDivisionError()) if raises else (None, None)))
    assert moved(model.a, first.step) == 2
    assert moved(model.b, second.step) == 2
    for optimizer in (first, second):
        optimizer.zero_grad()
    block(model, [first, second])
    assert moved(model.b, second.step) == 2


# -- optimizers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_run_that_scales_nothing_is_not_changed_by_one_that_scaled(level):
    """As under apex, its step is made whatever the gradients are; and it asks the device nothing."""
    first = Two()
    optimizer = sgd(first.parameters())
    start("O1", first, optimizer)
    block(first, optimizer)
    optimizer.step()
    model = Two()
    plain = sgd(model.parameters())
    amp.initialize(model, plain, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum() * float("inf"), plain) as scaled:
        scaled.backward()
    plain.step()
    assert not amp.step_was_skipped(plain)
    assert not model.a.weight.isfinite().any()


@LEVELS
@pytest.mark.parametrize("is_collected", [False, True])
def test_an_optimizer_for_each_stage_finds_unscaled_gradients(level, is_collected):
    """They stay, as under apex, but for those in masters, which a step has used."""
    model = Two()
    optimizer = sgd(model.parameters())
    start(level, model, optimizer)
    for stage in range(2):
        if stage:
            del optimizer
            if is_collected:
                gc.collect()
            optimizer = sgd(model.parameters())
            start(level, model, optimizer)
            assert gradients(optimizer) == ([None, None] if level == "O2" else [2, 2])
        optimizer.zero_grad()
        block(model, optimizer)
        assert moved(model.a, optimizer.step) == 2


def test_gradients_of_shared_masters_stay_until_they_are_cleared():
    """As gradients of shared float32 weights do in plain torch, whatever becomes of the other holder."""
    model, other = Two(), torch.nn.Parameter(torch.ones(1))
    first, second = sgd(model.parameters()), sgd([*model.parameters(), other])
    start("O2", model, [first, second])
    block(model, [first, second])
    first.step()
    del second
    gc.collect()
    block(model, first)
    assert gradients(first) == [4, 4]
    assert moved(model.a, first.step) == 4
    for param in model.parameters():
        param.grad = None
    block(model, first)
    assert gradients(first) == [2, 2]


@LEVELS
def test_one_of_two_taken_out_of_amp_leaves_delayed_gradients_to_the_other(level):
    model = Two()
    first, second = sgd(model.a.parameters()), sgd(model.parameters())
    start("O1", model, [first, second])
    block(model, [first, second], delay_unscale=True)
    amp.initialize([], first, enabled=False)
    assert moved(model.a, second.step) == 2


# -- levels ------------------------------------------------------------------------------------------------------------
@pytest.mark.cover(2)
@pytest.mark.parametrize("before", ["O2", "O3"])
@pytest.mark.parametrize("after", ["O1", "O2", "O3"])
@DELAYS
def test_after_a_change_of_level_no_gradient_is_used_that_is_still_scaled(before, after, delay_unscale):
    model = Two()
    optimizer = sgd(model.parameters())
    start(before, model, optimizer)
    block(model, optimizer, delay_unscale=delay_unscale)
    start(after, model, optimizer)
    by = moved(model.a, optimizer.step)
    assert by in ((2,) if before == after else (0, 2))
    optimizer.zero_grad()
    block(model, optimizer)
    assert moved(model.a, optimizer.step) == 2


def test_a_failed_change_of_level_keeps_masters():
    model = Two()
    optimizer = sgd(model.parameters())
    start("O2", model, optimizer)
    masters = list(amp.master_params(optimizer))
    block(model, optimizer)

    class Failing(torch.optim.SGD):
        @property
        def zero_grad(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start("O3", model, [optimizer, Failing([torch.ones(1)], lr=1.0)])
    assert all(now is then for now, then in zip(amp.master_params(optimizer), masters, strict=True))
    assert moved(model.a, optimizer.step) == 2


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_an_optimizer_of_another_level_steps_a_master_that_is_made_for_it(level):
    """The encoder at O2 has no optimizer of its own."""
    encoder, head = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    amp.initialize(encoder, opt_level="O2", verbosity=0)
    optimizer = sgd([*encoder.parameters(), *head.parameters()])
    start(level, head, optimizer)
    assert next(amp.master_params(optimizer)).dtype == torch.float32
    block(encoder, optimizer)
    assert moved(encoder, optimizer.step) == 2


def test_an_optimizer_of_another_level_steps_the_master_that_there_is():
    """A head at O1 is trained together with an encoder at O2, which has an optimizer of its own."""
    encoder, head = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    first, second = sgd(encoder.parameters()), sgd([*encoder.parameters(), *head.parameters()])
    start("O2", encoder, first)
    start("O1", head, second)
    assert next(amp.master_params(second)) is next(amp.master_params(first))
    block(encoder, [first, second])
    assert moved(encoder, first.step) == 2
    assert moved(encoder, second.step) == 2
    assert torch.equal(next(amp.master_params(first)).half(), encoder.weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_of_an_optimizer_that_let_go_of_a_weight_forgets_no_overflow(level):
    """Groups are edited by hand, so that nothing tells amp: the weight is the other's alone, with its overflow."""
    head, trunk = torch.nn.Linear(6, 3), torch.nn.Linear(6, 6)
    of_both = torch.optim.SGD([*head.parameters(), *trunk.parameters()], lr=0.1)
    of_trunk = torch.optim.SGD(trunk.parameters(), lr=0.1)
    (head, trunk), (of_both, of_trunk) = amp.initialize(
        [head, trunk], [of_both, of_trunk], opt_level=level, verbosity=0
    )
    with amp.scale_loss(trunk(torch.ones(2, 6)).float().sum() * torch.inf, of_trunk) as scaled:
        scaled.backward()
    del of_both.param_groups[0]["params"][2:]
    of_both.zero_grad()
    of_trunk.step()
    assert amp.step_was_skipped(of_trunk)
