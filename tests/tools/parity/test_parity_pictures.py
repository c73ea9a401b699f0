import math

import numpy
import pytest
from parity_runs import run, step
from PIL import Image

from ampcompat.amp import levels
from ampcompat.tools.parity.compare import Tolerance, judge
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.pictures import PALETTE, colour_of, save_comparison


def drawn(tmp_path, *runs, rtol=0.1):
    path = tmp_path / "picture.png"
    save_comparison(path, judge(runs, Tolerance(rtol)), Tolerance(rtol), "train.py")
    with Image.open(path) as image:
        assert image.format == "PNG"
        return numpy.asarray(image.convert("RGB")).astype(int)


def pixels(image, level):
    """How many pixels have the colour of ``level``, or nearly: the palette is a small one."""
    colour = [int(colour_of(level)[i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(image - colour).max(axis=2) <= 12).sum())


def test_each_level_is_there_in_its_colour(tmp_path):
    losses = [2.0**-i for i in range(10)]
    image = drawn(tmp_path, run("O0", losses), run("O2", [loss * 1.2 for loss in losses], "float16", scale=256.0))
    assert pixels(image, "O0") > 500
    assert pixels(image, "O2") > 500
    assert pixels(image, "O3") == 0


def test_new_rows_of_the_table_have_colours(tmp_path, monkeypatch):
    row = levels.LEVELS["O2"]
    for number in range(6, 9):
        monkeypatch.setitem(levels.LEVELS, f"O{number}", row)
    assert [colour_of(f"O{number}") for number in range(9)] == [*PALETTE, PALETTE[0]]
    assert drawn(tmp_path, run("O0", [1.0, 2.0]), run("O8", [1.0, 2.0], "float16")).std() > 0


def test_curves_that_coincide_can_be_told_apart(tmp_path):
    losses = [1.0, 2.0, 3.0]
    image = drawn(tmp_path, run("O0", losses), run("O1", losses, "float16"), run("O2", losses, "float16"))
    assert min(pixels(image, level) for level in ("O0", "O1", "O2")) > 50


def test_a_level_without_a_finite_loss_is_marked_at_each_step(tmp_path):
    losses = [1.0, 0.5, 0.25]
    lost = drawn(tmp_path, run("O0", losses), run("O3", [math.nan] * 3, "float16", scale=None))
    kept = drawn(tmp_path, run("O0", losses), run("O3", [None] * 3, "float16", scale=None))
    assert pixels(lost, "O3") > pixels(kept, "O3") + 100


def test_skipped_steps_are_marked(tmp_path):
    def steps(skip):
        return [step(i, 1.0, scale=2.0**16, skipped=skip and i == 3) for i in range(1, 6)]

    o0 = run("O0", [1.0] * 5)
    clean = drawn(tmp_path, o0, Run(Level("O2", "float16"), steps(False)))
    marked = drawn(tmp_path, o0, Run(Level("O2", "float16"), steps(True)))
    assert (clean != marked).any()


def test_each_optimizer_has_a_column(tmp_path):
    def two(level):
        return Run(level, [step(i, float(i), optimizer=i % 2) for i in range(1, 9)])

    one = drawn(tmp_path, run("O0", [1.0, 2.0]), run("O1", [1.0, 2.0], "float16"))
    both = drawn(tmp_path, two(Level("O0")), two(Level("O1", "float16")))
    assert both.shape[1] > one.shape[1]


@pytest.mark.parametrize(
    ("losses", "rtol"),
    [
        ([], 0.1),
        pytest.param([None, None], 0.0, marks=pytest.mark.slow),
        ([math.nan, math.inf], 0.1),
        pytest.param([1.0], 0.0, marks=pytest.mark.slow),
        ([0.0, 0.0], 0.0),
        ([-1.0, 5.0], 0.1),
        ([1.0, math.nan, 1.0], 0.1),
    ],
)
def test_whatever_was_recorded_can_be_drawn(tmp_path, losses, rtol):
    image = drawn(tmp_path, run("O0", losses), run("O1", losses[:1], "bfloat16", scale=math.inf), rtol=rtol)
    assert image.std() > 0
