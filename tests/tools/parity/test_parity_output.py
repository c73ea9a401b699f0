"""The table of a comparison, word for word, and its JSON."""

import json
import math

import pytest
from parity_runs import run, step

from ampcompat.tools.parity.compare import Tolerance, judge, judge_again
from ampcompat.tools.parity.save import save_json
from ampcompat.tools.parity.table import table


def results():
    o1 = run("O1", [1.0, 1.5, math.nan], "float16")
    return judge([run("O0", [1.0, 1.0, 1.0]), o1], Tolerance(0.1))


TABLE = """\
level    steps  max dev  skipped  verdict
-------  -----  -------  -------  --------------------------------
O0           3        -        0  reference
O1 fp16      3      inf        0  FAIL: loss 1.5 at step 2, O0's 1

dev: |loss - O0's| / |O0's|; within tolerance: |loss - O0's| <= 0.1 x |O0's| + 0.5"""


def test_table():
    assert table(results(), Tolerance(0.1, 0.5)) == TABLE


def test_verdicts_are_painted():
    painted = table(results(), Tolerance(0.1, 0.5), lambda text, colour: f"<{colour}>{text}").splitlines()
    assert painted[2].endswith("0  reference")
    assert painted[3].endswith("0  <red>FAIL: loss 1.5 at step 2, O0's 1")


@pytest.mark.parametrize(("others_skip", "told"), [(True, True), (False, False)])
def test_a_level_that_has_a_reference_of_its_own_is_named(others_skip, told):
    level = run("O1", [4.0, 4.0, 3.0], "float16")
    level.steps[0] = step(1, 4.0, skipped=True)
    level.reference = run("O0", [4.0, 4.0, 3.0]) if others_skip else None
    shown = table(judge([run("O0", [4.0, 4.0, 3.0]), level], Tolerance(0.1)), Tolerance(0.1)).splitlines()
    assert ("O1 fp16 is compared with a run of O0 that skipped the same steps" in shown) is told


def test_a_script_that_is_not_repeatable():
    again = judge_again(results(), run("O0", [1.5]))
    lines = table(again, Tolerance(0.1)).splitlines()
    assert lines[3].endswith("  FAIL: loss 1.5 at step 2, O0's 1")  # a NaN is one, whatever the seeds

    off = judge([run("O0", [1.0, 1.0]), run("O1", [1.0, 1.5], "float16")], Tolerance(0.1))
    lines = table(judge_again(off, run("O0", [1.5])), Tolerance(0.1)).splitlines()
    assert lines[3].endswith("  not repeatable")
    assert lines[-1] == (
        "Two runs of O0 differ before any step was made: the loss was 1, and then 1.5. What takes its seed from the"
        " clock or the system must be seeded with constants."
    )


@pytest.mark.parametrize(
    ("level", "verdict"),
    [
        (run("O1", [math.nan, 1.0]), "FAIL: loss nan at step 1, O0's 1"),
        (run("O1", [1.0, 1.0], skipped=True), "FAIL: 2 of 2 steps were skipped"),
        (run("O1", [1.0]), "FAIL: 1 losses, where the reference has 2"),
        (run("O1", [None, None]), "FAIL: no loss to compare"),
        (run("O1", [1.0], ending="crashed", message="crashed after 1 of 2 steps"), "FAIL: crashed after 1 of 2 steps"),
        (run("O1", [1.0, 1.0]), "within tolerance"),
    ],
)
def test_a_verdict(level, verdict):
    shown = table(judge([run("O0", [1.0, 1.0]), level], Tolerance(0.1)), Tolerance(0.1)).splitlines()
    assert shown[3].endswith(f"  {verdict}")


def test_json(tmp_path):
    save_json(tmp_path / "a.json", results(), {"steps": 3})
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["steps"], content["passed"]) == (3, False)
    assert [level["level"] for level in content["levels"]] == ["O0", "O1 fp16"]
    assert content["levels"][1]["first_beyond"] == 2
    assert content["levels"][1]["steps"][2]["loss"] == "nan"
    assert content["levels"][1]["steps"][1]["deviation"] == 0.5
