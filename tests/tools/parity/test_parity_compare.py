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


def test_a_run_within_the_tolerance_passes():
    assert verdicts(run("O0", [1.0, 2.0]), run("O1", [1.0, 2.1])) == [(True, "reference"), (True, "within tolerance")]


def test_a_run_out_of_tolerance_fails_and_smoothing_may_save_it():
    runs = run("O0", [1.0, 1.0, 1.0, 1.0]), run("O1", [1.2, 0.8, 1.2, 0.8])
    assert verdicts(*runs)[1] == (False, "out of tolerance from step 1")
    assert verdicts(*runs, rtol=0.2, window=2)[1] == (True, "within tolerance")


def test_a_loss_that_is_not_finite_is_named():
    assert verdicts(run("O0", [1.0, 1.0]), run("O1", [1.0, NAN]))[1] == (False, "loss nan at step 2")


def test_a_run_that_stops_early_fails_however_well_it_went():
    crashed = run("O1", [1.0], ending="crashed", message="crashed after 1 of 2 steps: KeyError: 'x'")
    assert verdicts(run("O0", [1.0, 1.0]), crashed)[1] == (False, crashed.message)


def test_a_script_that_ends_early_at_every_level():
    """It is compared up to where it ends."""
    runs = [run(level, [1.0, 2.0], ending="ended", message="the script ended by itself") for level in ("O0", "O1")]
    assert verdicts(*runs) == [(True, "reference"), (True, "within tolerance")]


def test_a_level_that_ends_before_float32_does_fails():
    short = run("O1", [1.0], ending="ended", message="the script ended by itself after 1 of 2 steps")
    assert verdicts(run("O0", [1.0, 1.0]), short)[1] == (False, short.message)


@pytest.mark.parametrize(
    "reference",
    [
        run("O0", [1.0], ending="crashed", message="crashed"),
        run("O0", [], ending="ended", message="the script never called amp.initialize"),
        run("O0", [None, None], message="no loss was seen"),
    ],
)
def test_without_a_reference_nothing_passes(reference):
    results = verdicts(reference, run("O1", [1.0]))
    assert results[0] == (False, reference.message)
    assert results[1][0] is False
    assert results[1][1] in ("nothing to compare with", "no loss to compare")


def test_a_float32_run_that_breaks_fails():
    """Its verdict says that precision is not the cause."""
    results = verdicts(run("O0", [1.0, NAN]), run("O1", [1.0, NAN]))
    assert results[0] == (False, "loss nan at step 2 in float32 itself: precision is not the cause")
    assert results[1] == (True, "within tolerance")


def test_runs_without_losses_do_not_pass():
    assert verdicts(run("O0", [1.0]), run("O1", [None], message="no loss was seen"))[1] == (False, "no loss was seen")
