"""``assert_opt_level_parity``: what it compares, what it reports, and what it refuses."""

import random

import numpy
import pytest
import torch
from amp_training import make_step
from internals import observers

from ampcompat import amp
from ampcompat.testing import assert_opt_level_parity


def train(level, steps=4, spoil=None):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).float().square().mean()
        if spoil and (level, step) in spoil:
            loss = loss * spoil[level, step]
        make_step(optimizer, loss)
        losses.append(loss.detach())
    return losses


def only_train(level):
    train(level)


def test_a_loop_that_agrees_gives_its_losses():
    losses = assert_opt_level_parity(train, ("O1", "O2", "O3"), rtol=1e-2)
    assert {level: len(values) for level, values in losses.items()} == {"O0": 4, "O1": 4, "O2": 4, "O3": 4}
    assert losses["O1"] != losses["O0"]


def test_losses_that_are_not_returned_are_those_of_the_blocks():
    assert assert_opt_level_parity(only_train, ("O2",)) == assert_opt_level_parity(train, ("O2",))


def failure(*args, **kwargs):
    with pytest.raises(AssertionError) as failed:
        assert_opt_level_parity(*args, **kwargs)
    return str(failed.value)


def test_the_message_shows_the_first_diverging_step():
    """It has the table of the command."""
    message = failure(lambda level: train(level, steps=9, spoil={("O2", 4): 1.5, ("O2", 6): 9.0}), ("O1", "O2"))
    lines = message.splitlines()
    assert lines[0] == "losses differ from those at O0"
    assert lines[6].split()[0] == "O2"
    assert " at step 5, O0's " in lines[6]


def test_a_loss_that_is_not_finite_fails_at_any_tolerance():
    assert "FAIL: loss nan at step 2" in failure(
        lambda level: [1.0, float("nan") if level == "O1" else 1.0], ("O1",), rtol=1e9
    )


def test_losses_missing_at_the_end_fail():
    message = failure(lambda level: [1.0, 2.0] if level == "O0" else [1.0], ("O1",))
    assert "FAIL: 1 losses, where the reference has 2" in message


def test_the_absolute_tolerance_counts():
    def at(level):
        return [1e-6 if level == "O0" else 2e-6]

    assert_opt_level_parity(at, ("O1",), atol=1e-5)
    failure(at, ("O1",))


def test_levels_start_from_the_same_seeds():
    """The user's generators are left as they were."""
    seen = []

    def draw(level):
        seen.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
        return [1.0]

    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = random.Random(1).random(), numpy.random.RandomState(1).rand()
    other = torch.rand(1, generator=torch.Generator().manual_seed(1)).item()
    assert_opt_level_parity(draw, ("O1", "O2"))
    assert (random.random(), numpy.random.rand()) == expected
    assert torch.rand(1).item() == other
    assert len(set(seen)) == 1


def test_each_level_starts_without_amp():
    """The casts of the level before it are off."""

    held = []  # casts last as long as their models

    def casts(level):
        assert not torch.is_autocast_enabled("cpu")
        held.append(amp.initialize(torch.nn.Linear(2, 2), opt_level=level, verbosity=0))
        return [1.0]

    assert_opt_level_parity(casts, ("O1", "O2"))
    assert not torch.is_autocast_enabled("cpu")
    assert observers() == []


def test_what_train_raises_goes_through_and_amp_is_reset():
    held = []

    def fail(level):
        held.append(amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0))
        raise KeyError(level)

    with pytest.raises(KeyError, match="O0"):
        assert_opt_level_parity(fail)
    assert not torch.is_autocast_enabled("cpu")


def test_losses_may_have_a_graph():
    """torch warns of what is made a number with its graph."""
    assert_opt_level_parity(lambda level: [torch.ones((), requires_grad=True) * 2], ("O1",))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"levels": ("01",)}, "'01' is not an opt_level"),
        ({"levels": ()}, "there must be a level"),
        ({"rtol": -1.0}, "no negative tolerance"),
        ({"atol": float("nan")}, "no negative tolerance"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(kwargs, match):
    with pytest.raises(ValueError, match=match):
        assert_opt_level_parity(lambda level: pytest.fail("ran"), **kwargs)


@pytest.mark.parametrize(("returned", "match"), [(None, "it returned None and made 0"), ([], "an empty sequence")])
def test_a_loop_without_losses_is_refused(returned, match):
    with pytest.raises(ValueError, match=match):
        assert_opt_level_parity(lambda level: returned)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (0.5, r"train\('O0'\) returned a float - it must return the losses of its steps, or None - collect them"),
        (torch.tensor(0.5), r"returned a Tensor - it must return the losses of its steps"),
        ([torch.ones(2)], r"returned a list with a Tensor in it that is no number - it must return"),
        (["x"], r"returned a list with a str in it that is no number - it must return"),
    ],
)
def test_what_is_no_sequence_of_losses_is_refused(returned, match):
    with pytest.raises(TypeError, match=match):
        assert_opt_level_parity(lambda level: returned)


def test_levels_as_a_string_are_refused_before_anything_runs():
    with pytest.raises(TypeError, match=r"levels='O1' is a string - it must be a sequence of levels - pass \('O1',\)"):
        assert_opt_level_parity(lambda level: pytest.fail("ran"), levels="O1")


def test_a_training_that_is_not_repeatable_is_told_so():
    losses = iter([[1.0], [2.0], [3.0]])
    message = failure(lambda level: next(losses), ("O1",))
    assert message.startswith("train is not repeatable\n")
    assert "Two runs of O0 differ before any step was made: the loss was 1, and then 3." in message
    assert "FAIL" not in message


def test_the_traceback_ends_in_the_test():
    """pytest hides the frames of the assertion itself: its message says it all."""
    with pytest.raises(AssertionError) as raised:
        assert_opt_level_parity(lambda level: [1.0 if level == "O0" else 2.0], levels=("O1",))
    assert raised.traceback[-1].ishidden(raised)
