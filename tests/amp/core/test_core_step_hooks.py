"""Hooks that torch calls around an optimizer's update, and steps of subclasses: they find the model as in plain torch.

The half weights are rounded from their masters when the update is done, so that a post-hook reads new weights, and what
it writes counts.
"""

import pytest
import torch
from amp_training import INF, assert_masters_agree, backward, masters, net, same, sgd, start, train
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompat import amp

pytestmark = pytest.mark.torch

LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
MAKERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=5.0),
    "fused": lambda model: torch.optim.SGD(model.parameters(), lr=5.0, fused=True),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=5.0, max_iter=1),
}
LIMIT = 0.0078125  # exact in half


def clamp(model):
    for param in model.parameters():
        param.data.clamp_(-LIMIT, LIMIT)


def largest(model):
    """Of the model's weights: a master that rounds to the limit may lie beyond it by half a step of the half dtype."""
    return max(float(param.detach().abs().max()) for param in model.parameters())


def step(model, optimizer, seed):
    if not isinstance(optimizer, torch.optim.LBFGS):
        backward(model, optimizer, seed)
        optimizer.step()
        optimizer.zero_grad()
        return

    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, seed)

    optimizer.step(closure)


@LEVELS
@pytest.mark.parametrize("kind", MAKERS)
def test_a_post_hook_that_clamps_the_weights(level, kind):
    model, optimizer = start(level, MAKERS[kind])
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    for seed in range(3):
        step(model, optimizer, seed)
    assert largest(model) <= LIMIT
    if level in ("O2", "O5"):
        assert_masters_agree(model)


@LEVELS
def test_a_post_hook_of_all_optimizers(level):
    model, optimizer = start(level, MAKERS["SGD"])
    handle = register_optimizer_step_post_hook(lambda *_: clamp(model))
    try:
        train(model, optimizer)
    finally:
        handle.remove()
    assert largest(model) <= LIMIT


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_post_hook_reads_the_weights_of_this_step(level):
    """As an average of them does."""
    model, optimizer = start(level)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.a.weight.detach().clone()))
    for seed in range(3):
        backward(model, optimizer, seed)
        optimizer.step()
        assert torch.equal(seen[-1], model.a.weight)
        assert torch.equal(seen[-1], masters(optimizer)[0].to(seen[-1].dtype))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("scope", ["own", "of all"])
def test_a_pre_hook_finds_unscaled_gradients_and_may_write_weights(level, scope):
    model, optimizer = start(level, loss_scale=2.0**10)
    norms = []

    def hook(*_):
        norms.append([float(p.grad.norm()) for p in amp.master_params(optimizer)])
        with torch.no_grad():
            model.a.weight.fill_(0.5)

    register = optimizer.register_step_pre_hook if scope == "own" else register_optimizer_step_pre_hook
    backward(model, optimizer)
    expected = [float(p.grad.norm()) for p in amp.master_params(optimizer)]
    gradient = next(iter(amp.master_params(optimizer))).grad.clone()
    handle = register(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert norms == [expected]
    assert torch.equal(masters(optimizer)[0], torch.full_like(gradient, 0.5) - 0.1 * gradient)


def test_hooks_of_the_script_are_called_once_and_stay_in_order():
    model, optimizer = start("O2")
    calls = []
    for name in ("first", "second"):
        optimizer.register_step_pre_hook(lambda *_, name=name: calls.append(f"pre {name}"))
        optimizer.register_step_post_hook(lambda *_, name=name: calls.append(f"post {name}"))
    train(model, optimizer, 2)
    assert calls == ["pre first", "pre second", "post first", "post second"] * 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_hook_runs_where_the_step_is_skipped(level):
    """As with GradScaler, which does not call the optimizer."""
    model, optimizer = start(level)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert calls == []


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_hook_that_raises_leaves_the_weights_of_the_step(level):
    model, optimizer = start(level)

    def fail(*_):
        raise ZeroDivisionError

    handle = optimizer.register_step_post_hook(fail)
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert_masters_agree(model)
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert_masters_agree(model)


# -- a step that goes on writing ---------------------------------------------------------------------------------------
def clamping(model, write):
    class Clamping(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            write(self, model)
            return loss

    return Clamping(model.parameters(), lr=5.0)


def by_data(optimizer, model):
    clamp(model)


def in_place(optimizer, model):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-LIMIT, LIMIT)


def by_its_groups(optimizer, model):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.clamp_(-LIMIT, LIMIT)


@pytest.mark.parametrize("write", [by_data, in_place])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_step_writes_into_half_weights_is_overwritten_by_masters(level, write):
    model, optimizer = start(level, lambda model: clamping(model, write))
    twin, twin_optimizer = start(level, lambda model: sgd(model, lr=5.0))
    train(model, optimizer, 1)
    train(twin, twin_optimizer, 1)
    assert_masters_agree(model)
    assert same(list(model.a.parameters()), list(twin.a.parameters()))


@LEVELS
def test_a_step_that_writes_what_it_holds_is_right(level):
    model = net()
    model, optimizer = start(level, lambda model: clamping(model, by_its_groups), model=model)
    train(model, optimizer)
    assert largest(model) <= LIMIT


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_that_do_nothing_change_nothing(level):
    model, optimizer = start(level)
    twin, twin_optimizer = start(level, model=net())
    twin_optimizer.register_step_pre_hook(lambda *_: None)
    twin_optimizer.register_step_post_hook(lambda *_: None)
    train(model, optimizer)
    train(twin, twin_optimizer)
    assert same(masters(optimizer), masters(twin_optimizer))
