"""How the losses of two runs are compared, and the verdicts."""

import math

import pytest
from parity_runs import run, step

from ampcompat.tools.parity.compare import Tolerance, compare, judge, judge_again, must_repeat, relative_deviation
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("loss", "reference", "expected"),
    [
        (1.5, 1.0, 0.5),
        (-1.5, -1.0, 0.5),
        (2.0, 2.0, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, INF),
        (NAN, 1.0, INF),
        (-INF, 1.0, INF),
        (1.0, NAN, None),
        (NAN, NAN, None),
    ],
)
def test_relative_deviation(loss, reference, expected):
    assert relative_deviation(loss, reference) == expected


@pytest.mark.parametrize(
    ("loss", "reference", "holds"),
    [
        (1.25, 1.0, True),
        (1.26, 1.0, False),
        (-1.25, -1.0, True),
        (NAN, 1.0, False),
        (INF, 1.0, False),
        (NAN, INF, True),  # float32 broke too: not the level's doing
        (1.0, NAN, True),
    ],
)
def test_the_limit_of_a_tolerance_belongs_to_it(loss, reference, holds):
    assert Tolerance(rtol=0.25).holds(loss, reference) is holds


def test_an_absolute_tolerance_is_added():
    assert Tolerance(rtol=0.0, atol=0.5).holds(0.5, 0.0)
    assert not Tolerance(rtol=0.0, atol=0.5).holds(0.51, 0.0)


def test_largest_and_first_beyond():
    found = compare([1.0, 1.5, 1.25, 4.0], [1.0, 1.0, 1.0, 1.0], Tolerance(0.3))
    assert (found.largest, found.first_beyond) == (3.0, 2)


def test_steps_that_cannot_be_compared_are_left_out():
    """They have no loss, or no finite reference."""
    found = compare([None, 1.0, 1.5], [1.0, NAN, 1.0, 1.0], Tolerance(1.0))
    assert found.by_step == [None, None, 0.5]
    assert found.first_beyond is None


def test_nothing_to_compare():
    found = compare([None], [1.0], Tolerance(1.0))
    assert (found.largest, found.first_beyond) == (None, None)


def verdicts(*runs):
    return [(result.passed, result.verdict) for result in judge(runs, Tolerance(0.1))]


CRASHED = {"ending": "crashed", "message": "crashed after 1 of 2 steps: KeyError: 'x'"}
ENDED = {"ending": "ended", "message": "the script ended by itself after 1 of 2 steps"}
NO_LOSS = {"message": "no loss was seen"}
#: The losses of O0 and of a level, how each run ended, and the verdicts.
JUDGED = {
    "within": (([1.0, 2.0], {}), ([1.0, 2.1], {}), (True, "reference"), (True, "within tolerance")),
    "beyond": (([1.0, 1.0], {}), ([1.0, 0.8], {}), (True, "reference"), (False, "loss 0.8 at step 2, O0's 1")),
    "not finite": (([1.0, 1.0], {}), ([1.0, NAN], {}), (True, "reference"), (False, "loss nan at step 2, O0's 1")),
    "stops early": (([1.0, 1.0], {}), ([1.0], CRASHED), (True, "reference"), (False, CRASHED["message"])),
    "ends before O0": (([1.0, 1.0], {}), ([1.0], ENDED), (True, "reference"), (False, ENDED["message"])),
    "both end early": (([1.0], ENDED), ([1.0], ENDED), (True, "reference"), (True, "within tolerance")),
    "no losses": (([1.0], {}), ([None], NO_LOSS), (True, "reference"), (False, "no loss was seen")),
    "float32 breaks": (
        ([1.0, NAN], {}),
        ([1.0, NAN], {}),
        (False, "loss nan at step 2 in float32 itself"),
        (True, "within tolerance"),
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_the_verdict_of_the_reference_and_of_a_level(name):
    (o0, o0_ended), (o1, o1_ended), *expected = JUDGED[name]
    assert verdicts(run("O0", o0, **o0_ended), run("O1", o1, **o1_ended)) == expected


@pytest.mark.parametrize(("losses", "ended"), [([1.0], CRASHED), ([], ENDED), ([None], NO_LOSS)])
def test_a_reference_that_nothing_can_be_compared_with(losses, ended):
    o0 = run("O0", losses, **ended)
    assert not o0.is_comparable
    assert verdicts(o0) == [(False, ended["message"])]


# -- skipped steps -----------------------------------------------------------------------------------------------------
def with_skips(losses, skips):
    steps = [step(number, loss, skipped=number in skips) for number, loss in enumerate(losses, start=1)]
    return Run(Level("O1", "float16"), steps)


def test_a_level_is_compared_with_a_reference_that_skipped_the_same():
    level = with_skips([4.0, 4.0, 3.0], (1,))
    level.reference = run("O0", [4.0, 4.0, 3.0])
    results = judge([run("O0", [4.0, 3.0, 2.0]), level], Tolerance(0.1))
    assert (results[1].passed, results[1].deviation.largest) == (True, 0.0)


@pytest.mark.parametrize(("skipped", "passes"), [(20, False), (19, False), (11, False), (10, True)])
def test_a_run_of_which_most_steps_are_skipped_is_no_pass(skipped, passes):
    """However close its losses are: the weights are the first ones."""
    found = judge([run("O0", [4.0] * 20), with_skips([4.0] * 20, range(1, skipped + 1))], Tolerance(9.0))[1]
    assert found.passed is passes
    assert found.run.is_mostly_skipped is not passes


def test_fewer_losses_than_the_reference_has_fail():
    found = judge([run("O0", [4.0, 3.0]), run("O1", [4.0])], Tolerance(9.0))[1]
    assert (found.passed, found.verdict) == (False, "1 losses, where the reference has 2")


def test_a_reference_that_is_not_repeatable_judges_no_finite_loss():
    runs = [run("O0", [1.0, 1.0]), run("O1", [2.0, 1.0]), run("O2", [1.0, NAN]), run("O3", [1.0, 1.0])]
    results = judge(runs, Tolerance(0.1))
    assert must_repeat(results)
    again = judge_again(results, run("O0", [1.5]))
    assert [bool(result.not_repeatable) for result in again] == [False, True, False, False]
    assert [result.passed for result in again] == [True, False, False, True]
    for repeated in (run("O0", [1.0 + 1e-6]), run("O0", []), run("O0", [None])):
        assert judge_again(results, repeated) == results


def test_a_run_of_which_no_loss_is_off_need_not_be_repeated():
    runs = [run("O0", [1.0, 1.0]), run("O1", [1.0, 1.0]), run("O2", [1.0], **CRASHED)]
    assert not must_repeat(judge(runs, Tolerance(0.1)))
