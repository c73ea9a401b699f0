"""A ``step`` that a script has put on the optimizer after ``initialize``."""

import types

import pytest
import torch
from amp_training import INF, backward, masters, same, start, train
from torch.optim import lr_scheduler

from ampcompat import amp

SKIPPED = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"


def step_of_the_class(optimizer):
    optimizer.step = lambda closure=None: torch.optim.SGD.step(optimizer, closure)


def bound_step_of_the_class(optimizer):
    def step(self, closure=None):
        return torch.optim.SGD.step(self, closure)

    optimizer.step = types.MethodType(step, optimizer)


def step_before(optimizer):
    """A wrapper around amp's own, as a timer is."""
    before = optimizer.step
    optimizer.step = lambda closure=None: before(closure)


def class_s_own_again(optimizer):
    del optimizer.step  # the class's is found in its place


REPLACEMENTS = [step_of_the_class, bound_step_of_the_class, step_before, class_s_own_again]


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_skipped_once(level, replace, capsys):
    model, optimizer = start(level, loss_scale="dynamic")
    replace(optimizer)
    before = masters(optimizer)
    amp._amp_state.verbosity = 1
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    assert capsys.readouterr().out.count(SKIPPED) == 1


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_are_those_of_amps_own(level, replace):
    ends, steps = [], []
    for replaces in (False, True):
        model, optimizer = start(level)
        if replaces:
            replace(optimizer)
        made = []
        watch = amp.on_step(made.append)
        train(model, optimizer, 3)
        watch.remove()
        steps.append(len(made))
        ends.append(masters(optimizer))
        ends.append([param.detach().clone() for param in model.parameters()])
    assert same(ends[0], ends[2])
    assert same(ends[1], ends[3])
    assert steps == [3, 3]


def test_a_step_that_is_replaced_in_each_iteration():
    model, optimizer = start("O1", loss_scale="dynamic")
    before = masters(optimizer)
    for _ in range(3):
        step_of_the_class(optimizer)
        backward(model, optimizer, times=INF)
        optimizer.step()
        optimizer.zero_grad()
    assert same(masters(optimizer), before)


def test_a_scheduler_s_step_stays():
    model, optimizer = start("O1")
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    step = optimizer.step
    train(model, optimizer, 2)
    if hasattr(step, "__wrapped__"):  # torch 2.4's does not say what it wraps: amp wraps it once more
        assert optimizer.step is step
    scheduler.step()  # without a warning that the optimizer has not stepped


def test_a_closure_goes_to_the_replaced_step():
    model, optimizer = start("O1")
    step_before(optimizer)
    backward(model, optimizer)  # amp follows at a block

    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer)

    before = masters(optimizer)
    optimizer.step(closure)
    assert not same(masters(optimizer), before)
    assert amp.step_was_skipped(optimizer) is False
