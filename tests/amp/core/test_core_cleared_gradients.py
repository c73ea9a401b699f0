"""Gradients that scripts clear in the model, not by the optimizer: masters must not keep what the model has lost."""

import pytest
import torch
from core_kit import backward, masters, net, same, sgd, start, train
from torch.utils.weak import TensorWeakRef

from ampcompat import amp


def momentum(model):
    return sgd(model, lr=0.02, momentum=0.9, weight_decay=0.01)


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


def test_half_gradients_are_not_kept_alive_by_their_masters():
    model, optimizer = start("O2")
    for clear in (optimizer.zero_grad, lambda: (optimizer.step(), model.zero_grad())):
        backward(model, optimizer)
        held = [TensorWeakRef(p.grad) for p in model.parameters()]
        clear()
        assert not any(ref() is not None for ref in held)
