"""A lost step whose cause is not known is put down to that of the nearest like it, within reason."""

import pytest

from ampcompat.tools.explain.lost import NEAR, NORMAL, LostStep, put_down


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
