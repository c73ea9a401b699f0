"""Overflows: which passes the scale counts, and which step is skipped.

Recorded runs of public scripts depend on the count: with another one their scales differ, and so do their figures.
"""

import pytest
import torch
from amp_training import INF, backward, loss_of, masters, same, start

from ampcompat import amp

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def scales():
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


def nothing(model, optimizer):
    pass


def by_the_optimizer(model, optimizer):
    optimizer.zero_grad()


def by_the_model(model, optimizer):
    model.zero_grad()


def by_hand(model, optimizer):
    for param in model.parameters():
        param.grad = None


CLEARS = [by_the_optimizer, by_the_model, by_hand]


def block_that_overflows(model, optimizer, fails):
    block = amp.scale_loss(loss_of(model) * INF, optimizer)
    block.__enter__().backward()
    block.__exit__(*((ZeroDivisionError, ZeroDivisionError()) if fails else (None, None)))


# -- what the scale counts ---------------------------------------------------------------------------------------------
@LEVELS
@pytest.mark.parametrize("between", [nothing, *CLEARS])
def test_each_overflow_of_an_accumulation_halves_the_scale(level, between):
    """Also where no step comes between; a clean pass onto gradients that are inf is a clean pass."""
    model, optimizer = start(level)
    seen = []
    for times in (INF, INF, 1.0, INF, 1.0):
        backward(model, optimizer, times=times)
        between(model, optimizer)
        seen += scales()
    assert seen == [2.0**15, 2.0**14, 2.0**14, 2.0**13, 2.0**13]
    assert amp._amp_state.loss_scalers[0]._unskipped == 1
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert scales() == [2.0**13]


@LEVELS
def test_each_scaler_counts_the_passes_of_its_own_loss(level):
    """Four losses of one optimizer: the gradients of the third are added to the others' gradients, which are inf."""
    model, optimizer = start(level, num_losses=4)
    for _ in range(3):
        for loss_id in range(4):
            backward(model, optimizer, times=1.0 if loss_id == 2 else INF, loss_id=loss_id)
    assert scales() == [8192.0, 8192.0, 65536.0, 8192.0]


@LEVELS
@pytest.mark.parametrize("times", [(INF, 1.0), (1.0, INF), (INF, INF)])
@pytest.mark.parametrize("counts", ["update_scale", "block"])
def test_passes_that_put_the_transition_off_count_as_one(level, times, counts):
    """As under apex, where ``delay_overflow_check`` left one call of ``update_scale()`` to the script."""
    model, optimizer = start(level)
    for factor in times:
        backward(model, optimizer, times=factor, delay_overflow_check=True)
    assert scales() == [2.0**16]
    if counts == "update_scale":
        assert amp._amp_state.loss_scalers[0].update_scale() is True
    else:
        backward(model, optimizer)
    assert scales() == [2.0**15]
    optimizer.step()
    assert amp.step_was_skipped(optimizer) is (counts == "block")  # by update_scale() the script decides


@LEVELS
@pytest.mark.parametrize("after", [1.0, INF])
def test_an_overflow_of_a_failed_block_is_counted_by_the_next_block(level, after):
    """Once, also where that overflows too; the step before is skipped."""
    model, optimizer = start(level)
    before = masters(optimizer)
    block_that_overflows(model, optimizer, fails=True)
    assert scales() == [2.0**16]
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer, times=after)
    assert scales() == [2.0**15]
    backward(model, optimizer)
    assert scales() == [2.0**15]


# -- which step is skipped ---------------------------------------------------------------------------------------------
MAKERS = {
    "host": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "device": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
}


@pytest.mark.cover(2)
@LEVELS
@pytest.mark.parametrize("decides", MAKERS)
@pytest.mark.parametrize("clear", [*CLEARS, nothing])
@pytest.mark.parametrize("fails", [False, True])
def test_the_next_step_is_skipped_whatever_was_cleared_and_no_other(level, decides, clear, fails):
    model, optimizer = start(level, MAKERS[decides])
    before = masters(optimizer)
    block_that_overflows(model, optimizer, fails)
    clear(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert not same(masters(optimizer), before)
    assert all(param.isfinite().all() for param in masters(optimizer))


@LEVELS
@pytest.mark.parametrize("decides", MAKERS)
def test_blocks_of_either_kind_after_a_delayed_overflow_leave_its_step_skipped(level, decides):
    model, optimizer = start(level, MAKERS[decides])
    before = masters(optimizer)
    for times, delays in ((INF, True), (1.0, False), (1.0, True), (1.0, False)):
        optimizer.zero_grad()
        backward(model, optimizer, times=times, delay_unscale=delays)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    assert scales() == [2.0**15]


@pytest.mark.cover(2)
@LEVELS
@pytest.mark.parametrize("decides", MAKERS)
@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_of_several_losses_that_are_copied_cleared_and_brought_back(level, decides, clear):
    """PCGrad and GEM: the overflow of one loss skips the step that would use it."""
    model, optimizer = start(level, MAKERS[decides])
    moves = []
    for factors in ((1.0, 1.0), (INF, 1.0), (1.0, INF), (1.0, 1.0)):
        copies = []
        for seed, factor in enumerate(factors):
            clear(model, optimizer)
            backward(model, optimizer, seed, times=factor)
            copies.append([param.grad.clone() for param in amp.master_params(optimizer)])
        for param, *gradients in zip(amp.master_params(optimizer), *copies, strict=True):
            param.grad = torch.stack(gradients).mean(0)
        before = masters(optimizer)
        optimizer.step()
        moves.append(not same(masters(optimizer), before))
        assert amp.step_was_skipped(optimizer) is not moves[-1]
    assert moves == [True, False, False, True]
    assert all(param.isfinite().all() for param in masters(optimizer))


def test_a_second_step_uses_what_was_not_cleared():
    """One step is skipped for an overflow, as under apex: gradients that are inf stay until they are cleared."""
    model, optimizer = start("O1")
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert not model.b.weight.isfinite().any()


@pytest.mark.parametrize("load", ["amp", "scaler"])
def test_a_loaded_scale_forgets_delayed_overflows(load):
    model, optimizer = start("O1")
    (scaler,) = amp._amp_state.loss_scalers
    saved = amp.state_dict() if load == "amp" else scaler.state_dict()
    backward(model, optimizer, times=INF, delay_unscale=True)
    if load == "amp":
        amp.load_state_dict(saved)
    else:
        scaler.load_state_dict(saved)
    optimizer.zero_grad()
    before = scaler.loss_scale()
    backward(model, optimizer)
    assert scaler.loss_scale() == before
