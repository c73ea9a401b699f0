"""A run that was interrupted and resumed is bitwise the run that was not.

The laws resume after any step, into new objects and into those of the run; here are the orders of the loads, and other
levels.
"""

import copy
import functools

import pytest
import torch
from runs import LEVELS, LOADS, OPTIMIZERS, ORDERS, Net, Run, resumed, same

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]


@functools.cache
def interrupted_after_three_steps(level, optimizer):
    """A checkpoint, and what the run had come to a step later: the same for each order."""
    run = Run(level, optimizer)
    for _ in range(3):
        run.step()
    saved = run.save()
    run.step()
    return saved, run.facts()


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS, ids=[" ".join(name[0] for name in order) for order in ORDERS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_in_every_order_of_initialize_and_the_loads(level, optimizer, order):
    saved, want = interrupted_after_three_steps(level, optimizer)
    again = resumed(saved, level, optimizer, order)
    again.step()
    same(again.facts(), want)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("via", LEVELS)
def test_across_levels_no_bit_of_the_masters_is_lost(via, optimizer):
    run = Run("O2", optimizer)
    for _ in range(3):
        run.step()
    saved = run.save()
    want = run.facts()
    other = resumed(saved, via, optimizer)
    # O3 keeps half weights and nothing else: what it loads is rounded, as under apex.
    if via == "O3":
        pytest.raises(AssertionError, same, other.facts()["model"], want["model"])
        return
    same(other.facts()["model"], want["model"])
    same(other.facts()["optimizer"], want["optimizer"])
    back = resumed(other.save(), "O2", optimizer)
    same(back.facts(), want)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("via", ["O0", "O1", "O4", "O5"])
def test_across_levels_in_one_process_with_the_same_objects(via, optimizer):
    reference = Run("O2", optimizer)
    for _ in range(4):
        reference.step()
    uninterrupted = reference.facts()
    del reference
    run = Run("O2", optimizer)
    for _ in range(3):
        run.step()
    want = run.facts()
    scalers = amp.state_dict()
    run.initialize(via)
    same(run.facts()["model"], want["model"])
    same(run.facts()["optimizer"], want["optimizer"])
    run.initialize("O2")
    amp.load_state_dict(scalers)
    same(run.facts(), want)
    run.step()
    same(run.facts(), uninterrupted)


def test_training_at_the_other_level_goes_on_from_the_masters():
    run = Run("O2", "adam")
    for _ in range(3):
        run.step()
    run.initialize("O1")
    run.step()
    assert run.model.a.weight.dtype == torch.float32
    assert {id(p) for p in amp.master_params(run.optimizer)} == {id(p) for p in run.model.parameters()}
    exact = copy.deepcopy(run.model.state_dict())
    run.initialize("O2")
    same(dict(run.model.state_dict()), dict(exact))
    run.step()


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("level", LEVELS)
def test_without_the_amp_part_scalers_start_anew(level, order):
    run = Run(level, "sgd")
    run.step()
    saved = run.save()
    trained = amp.state_dict()
    again = resumed(saved, level, "sgd", (*order, "initialize"))
    assert amp.state_dict() == {name: {**entry, "unskipped": 0} for name, entry in trained.items()}
    again.step()


def test_the_state_dict_survives_the_steps_after_it():
    """It hands out live tensors, as plain torch does; a saved file holds what was saved."""
    run = Run("O2", "sgd")
    live = run.model.state_dict()
    run.step()
    same(dict(live), dict(run.model.state_dict()))
    kept = run.save()
    run.step()
    other = resumed(kept, "O2", "sgd", LOADS)
    assert not torch.equal(other.model.state_dict()["a.weight"], run.model.state_dict()["a.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_models_load_across_plain_and_amp(level):
    """A plain model loads what a model saved at any level, and the reverse."""
    run = Run(level, "sgd")
    run.step()
    plain = Net()
    plain.load_state_dict(run.model.state_dict())
    assert all(v.dtype == torch.float32 for v in run.model.state_dict().values() if v.is_floating_point())
    torch.manual_seed(5)
    other = Net()
    run.model.load_state_dict(other.state_dict())
    if level != "O3":
        same(dict(run.model.state_dict()), dict(other.state_dict()))
