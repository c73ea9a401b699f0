"""Gradients that a script copies, clears and brings back (PCGrad, GEM, clipping by sample), with their overflow."""

import pytest
import torch
from core_kit import backward, masters, same, start

from ampcompat import amp

INF = float("inf")
SAID = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"


def by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": by_hand,
}
OPTIMIZERS = {
    "the host decides": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "the device decides": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
}


def gradients_of(model, optimizer, clear, times):
    """The gradients of one loss after the other."""
    copies = []
    for seed, factor in enumerate(times):
        clear(model, optimizer)
        backward(model, optimizer, seed, times=factor)
        copies.append([p.grad.clone() for p in amp.master_params(optimizer)])
    return copies


def bring_back(optimizer, copies):
    for p, *gradients in zip(amp.master_params(optimizer), *copies, strict=True):
        p.grad = torch.stack(gradients).mean(0)


@pytest.mark.parametrize("clears_last", [False, True])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_a_loss_whose_gradients_were_cleared(level, clear, make_optimizer, clears_last, capsys):
    model, optimizer = start(level, make_optimizer)
    before = masters(optimizer)
    copies = gradients_of(model, optimizer, clear, times=[INF, 1.0])
    if clears_last:
        clear(model, optimizer)
    bring_back(optimizer, copies)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    assert capsys.readouterr().out == SAID
    clear(model, optimizer)
    bring_back(optimizer, gradients_of(model, optimizer, clear, times=[1.0, 1.0]))
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert all(p.isfinite().all() for p in masters(optimizer))
    assert not same(masters(optimizer), before)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_that_leaves_out_what_overflowed_steps(level, make_optimizer, capsys):
    model, optimizer = start(level, make_optimizer)
    before = masters(optimizer)
    _, finite = gradients_of(model, optimizer, CLEARS["optimizer"], times=[INF, 1.0])
    bring_back(optimizer, [finite])
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert not same(masters(optimizer), before)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_step_after_the_next_one_knows_nothing_of_it(level):
    """A gradient that is not finite and comes from no block is the script's own affair, as in plain torch."""
    model, optimizer = start(level)
    backward(model, optimizer, times=INF)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    bring_back(optimizer, [[torch.full_like(p, INF) for p in amp.master_params(optimizer)]])
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
