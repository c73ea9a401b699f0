"""Which lost steps are a normal back-off of the loss scale; the others are put down to the nearest like them."""

import json
from dataclasses import asdict

import pytest

from ampcompat.tools.explain.lost import (
    FALLING,
    NEAR,
    NORMAL,
    LostStep,
    end_fall,
    overflows_persist,
    put_down,
)
from ampcompat.tools.explain.underflow import Underflow
from ampcompat.tools.explain.verdict import Account, Verdict


def seen(number, what="loss", fault="log"):
    return LostStep(what, fault, was_watched=True, number=number)


@pytest.mark.parametrize(
    ("others", "step", "fault"),
    [
        ([seen(3)], LostStep("loss", number=1), "log"),
        ([seen(3)], LostStep("gradients", number=1), ""),  # not like it
        ([seen(3 + NEAR)], LostStep("loss", number=1), ""),  # too far
        ([seen(3 + NEAR)], LostStep("loss", number=1, was_looked_into=False), "log"),
        ([seen(2), seen(9, fault="exp")], LostStep("loss", number=7), "exp"),
        ([LostStep("loss", "log", number=2)], LostStep("loss", number=3), ""),  # that was run again, and this one too
        ([seen(2)], LostStep("loss", number=3, back_off=NORMAL), ""),
        ([seen(2)], LostStep("loss", "exp", number=3), "exp"),
    ],
)
def test_the_nearest_like_it(others, step, fault):
    rows = sorted([*others, step], key=lambda one: one.number)
    found = put_down(rows)
    assert found[rows.index(step)].fault == fault
    assert [one.fault for one in found if one.number != step.number] == [one.fault for one in others]


@pytest.mark.parametrize(
    ("numbers", "what", "is_normal"),
    [
        ([3], "gradients", True),
        ([3, 4 + NEAR], "gradients", True),
        ([3, 3 + NEAR], "gradients", False),
        ([1, 100, 104 + NEAR], "gradients", True),
        ([3], "loss", False),
    ],
)
def test_a_single_skip_at_a_scale_that_had_worked_is_normal(numbers, what, is_normal):
    lost = [LostStep(what, number=number, skipped=True) for number in numbers]
    assert Verdict([account(lost, 1000)], ranks=1).unknown == (set() if is_normal else set(numbers))


def test_what_another_rank_explained_stands_not_beside_a_single_skip():
    own = [LostStep("gradients", number=number, skipped=True) for number in (2, 5, 10, 15)]
    of_other = [own[0], *(LostStep("loss", "nan", number=row.number, skipped=True) for row in own[1:])]
    other = account(of_other, rank=1)
    other.told = {"nan": "a NaN"}
    verdict = Verdict([account(own), other], ranks=2)
    assert verdict.unknown == set()
    assert str(verdict) == (
        "4 of 40 steps were skipped; the cause of 3 of these is a NaN (on rank 1);"
        " 1 was lost while the loss scale came down, which is normal."
    )


def account(lost, steps=40, rank=0, has_told_unknown=False):
    return Account(rank, steps, lost, {}, has_told_unknown, 0, [], None)


def skipped(count, **fields):
    return [LostStep("gradients", skipped=True, number=number + 1, **fields) for number in range(count)]


@pytest.mark.parametrize(
    ("last", "scale", "persists"),
    [
        ([*skipped(10), *10 * [None]], 128.0, False),
        ([*skipped(11), *9 * [None]], 128.0, True),
        ([*skipped(11), *8 * [None]], 128.0, False),  # too few to tell
        (skipped(16), 1.0, False),
        (skipped(17), 0.5, True),
        ([*skipped(10), LostStep("loss"), *9 * [None]], 128.0, False),  # that one was made
    ],
)
def test_overflows_persist_in_most_of_the_last_steps_or_below_a_scale_of_1(last, scale, persists):
    assert overflows_persist(last, scale) == persists


@pytest.mark.parametrize(("back_off", "is_unknown"), [(NORMAL, False), ("", True)])
def test_a_fall_is_normal_if_a_step_is_made_after_it(back_off, is_unknown):
    last = [*skipped(2, back_off=FALLING), None, *skipped(1)]
    end_fall(last, back_off)
    assert [row.is_unknown for row in last if row] == [is_unknown, is_unknown, True]


@pytest.mark.parametrize(
    ("lost", "is_anything_told", "ordinary"),
    [
        (skipped(5), False, True),
        (skipped(6), False, False),  # most of them
        (skipped(5), True, False),
        ([*skipped(2), LostStep("weights", number=3)], False, False),
        ([], False, False),
    ],
)
def test_the_lost_steps_of_an_ordinary_run(lost, is_anything_told, ordinary):
    verdict = Verdict([account(lost, 10, has_told_unknown=is_anything_told)], ranks=1)
    assert str(verdict).endswith("that is normal.") == ordinary


def test_what_another_rank_did_not_explain_is_not_called_normal():
    accounts = [account([]), account([LostStep("loss", number=9)], steps=40, rank=1, has_told_unknown=True)]
    verdict = Verdict(accounts, ranks=2)
    assert (
        str(verdict) == "1 of 40 steps had a loss, a gradient or a weight that is not finite; the cause was not found."
    )


def test_an_account_comes_back_from_json():
    own = Account(1, 40, [LostStep("loss", number=9)], {}, False, 0, [], Underflow(40, 0.5, 1.0, 3))
    assert Account(**json.loads(json.dumps(asdict(own)))) == own
