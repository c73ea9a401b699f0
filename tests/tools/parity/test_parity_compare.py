import math

import pytest
from parity_runs import run, step

from ampcompat.tools.parity.compare import Tolerance, compare, judge, relative_deviation, smoothed
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.record import Run

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
def test_the_border_of_a_tolerance_belongs_to_it(loss, reference, holds):
    assert Tolerance(rtol=0.25).holds(loss, reference) is holds


def test_an_absolute_tolerance_is_added():
    assert Tolerance(rtol=0.0, atol=0.5).holds(0.5, 0.0)
    assert not Tolerance(rtol=0.0, atol=0.5).holds(0.51, 0.0)


def test_largest_mean_and_first_beyond():
    found = compare([1.0, 1.5, 1.25, 4.0], [1.0, 1.0, 1.0, 1.0], Tolerance(0.3))
    assert (found.largest, found.mean, found.first_beyond) == (3.0, 0.9375, 2)


def test_steps_that_cannot_be_compared_are_left_out():
    """They have no loss, or no finite reference."""
    found = compare([None, 1.0, 1.5], [1.0, NAN, 1.0, 1.0], Tolerance(1.0))
    assert found.by_step == [None, None, 0.5]
    assert (found.mean, found.first_beyond) == (0.5, None)


def test_nothing_to_compare():
    found = compare([None], [1.0], Tolerance(1.0))
    assert (found.largest, found.mean, found.first_beyond) == (None, None, None)


def test_smoothing_takes_the_last_losses_of_each_optimizer():
    steps = [step(1, 1.0), step(2, 10.0, optimizer=1), step(3, 3.0), step(4, 30.0, optimizer=1), step(5, 5.0)]
    assert smoothed(Run(Level("O0"), steps), 2) == [1.0, 10.0, 2.0, 20.0, 4.0]
    assert smoothed(Run(Level("O0"), steps), 1) == [s.loss for s in steps]


def test_smoothing_lets_a_nan_through_while_it_is_in_the_window():
    means = smoothed(run("O1", [1.0, NAN, 1.0, 1.0]), 2)
    assert [math.isnan(mean) for mean in means] == [False, True, True, False]


def verdicts(*runs, rtol=0.1, **kwargs):
    return [(result.passed, result.verdict) for result in judge(runs, Tolerance(rtol), **kwargs)]


CRASHED = {"ending": "crashed", "message": "crashed after 1 of 2 steps: KeyError: 'x'"}
ENDED = {"ending": "ended", "message": "the script ended by itself after 1 of 2 steps"}
NO_LOSS = {"message": "no loss was seen"}
#: The losses of O0 and of a level, how each run ended, and the verdicts.
JUDGED = {
    "within": (([1.0, 2.0], {}), ([1.0, 2.1], {}), (True, "reference"), (True, "within tolerance")),
    "beyond": (([1.0, 1.0], {}), ([1.0, 0.8], {}), (True, "reference"), (False, "out of tolerance from step 2")),
    "not finite": (([1.0, 1.0], {}), ([1.0, NAN], {}), (True, "reference"), (False, "loss nan at step 2")),
    "stops early": (([1.0, 1.0], {}), ([1.0], CRASHED), (True, "reference"), (False, CRASHED["message"])),
    "ends before O0": (([1.0, 1.0], {}), ([1.0], ENDED), (True, "reference"), (False, ENDED["message"])),
    "both end early": (([1.0], ENDED), ([1.0], ENDED), (True, "reference"), (True, "within tolerance")),
    "no losses": (([1.0], {}), ([None], NO_LOSS), (True, "reference"), (False, "no loss was seen")),
    "O0 stops early": (([1.0], CRASHED), ([1.0], {}), (False, CRASHED["message"]), (False, "nothing to compare with")),
    "O0 ends at once": (([], ENDED), ([1.0], {}), (False, ENDED["message"]), (False, "no loss to compare")),
    "O0 has no losses": (([None], NO_LOSS), ([1.0], {}), (False, "no loss was seen"), (False, "no loss to compare")),
    "float32 breaks": (
        ([1.0, NAN], {}),
        ([1.0, NAN], {}),
        (False, "loss nan at step 2 in float32 itself: precision is not the cause"),
        (True, "within tolerance"),
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_the_verdict_of_the_reference_and_of_a_level(name):
    (o0, o0_ended), (o1, o1_ended), *expected = JUDGED[name]
    assert verdicts(run("O0", o0, **o0_ended), run("O1", o1, **o1_ended)) == expected


def test_smoothing_may_bring_a_run_into_tolerance():
    runs = run("O0", [1.0, 1.0, 1.0, 1.0]), run("O1", [1.2, 0.8, 1.2, 0.8])
    assert verdicts(*runs)[1] == (False, "out of tolerance from step 1")
    assert verdicts(*runs, rtol=0.2, window=2)[1] == (True, "within tolerance")
