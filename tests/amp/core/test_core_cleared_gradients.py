"""Gradients that scripts clear in the model, not by the optimizer: masters must not keep what the model has lost."""

import warnings

import pytest
import torch
from core_kit import backward, loss_of, masters, net, same, sgd, start, train
from torch.utils.weak import TensorWeakRef

from ampcompat import amp

LEVELS = ["O1", "O2", "O5"]


def momentum(model):
    return sgd(model, lr=0.02, momentum=0.9, weight_decay=0.01)


def plain(level, steps):
    """``steps(model, optimizer, backward)`` under amp, and the same in plain torch: the weights of both."""
    twin = net()
    twin_optimizer = momentum(twin)
    steps(twin, twin_optimizer, lambda seed: loss_of(twin, seed).backward())  # first: casts are ambient
    model, optimizer = start(level, momentum)
    steps(model, optimizer, lambda seed: backward(model, optimizer, seed))
    return masters(optimizer), [p.detach() for p in twin.parameters()]


def assert_alike(level, steps):
    # Half precision leaves some 1e-5 (1e-4 in bfloat16) after six steps of 0.02; one stale gradient is 2e-2.
    for ours, theirs in zip(*plain(level, steps), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_frozen_by_clearing_its_gradients(level):
    """SwAV and DINO hold their last layer back so in the first epoch."""

    def steps(model, optimizer, backward):
        for seed in range(6):
            optimizer.zero_grad()
            backward(seed)
            if seed < 4:
                for param in model.b.parameters():
                    param.grad = None
            optimizer.step()

    assert_alike(level, steps)


def test_it_stays_to_the_bit():
    model, optimizer = start("O2", momentum)
    before = [p.detach().clone() for p in model.b.parameters()]
    backward(model, optimizer)
    for param in model.b.parameters():
        param.grad = None
    optimizer.step()
    assert same(before, list(model.b.parameters()))


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_given_up_is_forgotten_by_model_zero_grad(level):
    """``if not torch.isfinite(norm): continue``, with ``model.zero_grad()`` at the head of the loop."""

    def steps(model, optimizer, backward):
        for seed in range(6):
            model.zero_grad()
            backward(seed)
            if seed % 3 != 1:
                optimizer.step()

    assert_alike(level, steps)


@pytest.mark.parametrize("delayed", [False, True])
def test_so_it_is_beside_a_block_that_delays(delayed):
    model, optimizer = start("O2")
    twin, twin_optimizer = start("O2", model=net())
    backward(model, optimizer, 5)
    model.zero_grad()
    for a_model, an_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        if delayed:
            backward(a_model, an_optimizer, 1, delay_unscale=True)
        backward(a_model, an_optimizer, 2)
        an_optimizer.step()
    for ours, theirs in zip(masters(optimizer), masters(twin_optimizer), strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_last_block_did_not_reach_is_kept():
    """Accumulation over losses of different parts: a half gradient that is not there was not cleared."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    kept = [p.grad.clone() for p in amp.master_params(optimizer)]
    with amp.scale_loss((model.a.weight.float() * 0).sum(), optimizer) as scaled:
        scaled.backward()
    with amp.scale_loss((model.a.weight.float() * 0).sum(), optimizer) as scaled:
        scaled.backward()
    assert same(kept, [p.grad for p in amp.master_params(optimizer)])
    optimizer.step()
    twin, twin_optimizer = start("O2", model=net())
    train(twin, twin_optimizer, 1)
    assert same(masters(optimizer), masters(twin_optimizer))


def test_clearing_what_the_last_block_did_not_reach():
    """Model gradients that only an earlier block gave are cleared: those masters do not move."""
    model, optimizer = start("O2", loss_scale=2.0**10)
    before = masters(optimizer)
    backward(model, optimizer)
    summed = [p.grad + 1.0 for p in amp.master_params(optimizer)]
    with amp.scale_loss(model.b.bias.float().sum(), optimizer) as scaled:
        scaled.backward()
    *others, bias = amp.master_params(optimizer)
    assert torch.equal(bias.grad, summed[-1])
    assert torch.equal(model.b.bias.grad, torch.full((3,), 2.0**10).half())  # of this block alone
    for half, master in zip((model.a.weight, model.a.bias), others, strict=False):
        assert torch.equal(half.grad, (master.grad * 2.0**10).half())  # of all blocks
        half.grad = None
    optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, masters(optimizer), strict=True)]
    assert moved[:2] == [False, False]
    assert all(moved[2:])


def test_another_optimizers_block_restores_nothing():
    """A GAN: the generator's loss gives the discriminator gradients, whose own were cleared in the model."""
    models = [net(0), net(1)]
    models, optimizers = amp.initialize(models, [sgd(m) for m in models], opt_level="O2", verbosity=0)
    before = masters(optimizers[0])
    backward(models[0], optimizers[0])
    models[0].zero_grad()
    with amp.scale_loss(loss_of(models[0]) + loss_of(models[1]), optimizers[1]) as scaled:
        scaled.backward()
    optimizers[0].step()
    assert same(masters(optimizers[0])[:2], before[:2])
    assert same(masters(optimizers[0])[-2:], before[-2:])


@pytest.mark.parametrize("again", [True, False])
def test_a_new_optimizer_starts_without_gradients(again):
    """A second stage, with ``model.zero_grad()`` at the head of its loop."""
    model, first = start("O2", momentum)
    backward(model, first)
    first.step()
    if again:
        model, second = amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    else:
        second = sgd(model)
        amp.initialize([], second, opt_level="O2", verbosity=0)
    model.zero_grad()
    backward(model, second, 1)
    grads = [p.grad.clone() for p in amp.master_params(second)]
    second.zero_grad()
    backward(model, second, 1)
    assert same(grads, [p.grad for p in amp.master_params(second)])


def test_an_optimizer_joins_before_the_step():
    """A second optimizer for the model, given between a block and its step, does not change the gradients."""
    model, first = start("O2")
    backward(model, first)
    _, second = amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    kept = [p.grad.clone() for p in amp.master_params(first)]
    assert same(kept, [p.grad for p in amp.master_params(second)])


def test_a_step_leaves_shared_gradients_to_others():
    """Two optimizers with the same parameters and one loss: both step with its gradients."""
    model = net()
    both = [sgd(model), sgd(model)]
    model, both = amp.initialize(model, both, opt_level="O2", verbosity=0)
    with amp.scale_loss(loss_of(model), both) as scaled:
        scaled.backward()
    want = [torch.nn.Parameter(p.detach().clone()) for p in amp.master_params(both[0])]
    for param, master in zip(want, amp.master_params(both[0]), strict=True):
        param.grad = master.grad.clone()
    plain = torch.optim.SGD(want, lr=0.1)
    for optimizer in both:
        optimizer.step()
        plain.step()
    assert same(masters(both[0]), [p.detach() for p in want])


def test_a_half_gradient_replaced_after_the_block_is_warned_of():
    """Gradient surgery (PCGrad) writes ``p.grad = projected``: at O2 the masters' gradients are stepped with."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    model.b.weight.grad = model.b.weight.grad * 0.5
    with pytest.warns(UserWarning, match="Gradients of the model's half parameters were edited"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)


def test_half_gradients_are_not_kept_alive_by_their_masters():
    model, optimizer = start("O2")
    for clear in (optimizer.zero_grad, lambda: (optimizer.step(), model.zero_grad())):
        backward(model, optimizer)
        held = [TensorWeakRef(p.grad) for p in model.parameters()]
        clear()
        assert not any(ref() is not None for ref in held)
