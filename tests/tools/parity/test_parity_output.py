import csv
import json
import math

from parity_runs import run, step

from ampcompat.tools.parity.compare import Tolerance, judge
from ampcompat.tools.parity.save import save_csv, save_json
from ampcompat.tools.parity.table import table


def results():
    o1 = run("O1", [1.0, 1.5, math.nan], "float16", scale=65536.0)
    return judge([run("O0", [1.0, 1.0, 1.0]), o1], Tolerance(0.1))


def test_summaries_of_a_run():
    mixed = run("O1", [1.0, 1.0, 1.0])
    mixed.steps = [
        step(1, 1.0, seconds=None, memory=5),
        step(2, 1.0, seconds=0.3, memory=9, skipped=True),
        step(3, 1.0, seconds=0.1, memory=9),
    ]
    assert (mixed.seconds_per_step, mixed.peak_memory) == (0.2, 9)
    assert (run("O0", []).seconds_per_step, run("O0", []).peak_memory) == (None, None)


TABLE = """\
level    steps  max dev  mean dev  first beyond  skipped  s/step  peak MiB  verdict
-------  -----  -------  --------  ------------  -------  ------  --------  ----------------------------------
O0           3        -         -             -        0     0.5         1  reference
O1 fp16      3      inf       inf             2        0     0.5         1  FAIL: out of tolerance from step 2

dev: |loss - O0's| / |O0's|; beyond: |loss - O0's| > 0.1 x |O0's| + 0.5; s/step: median"""


def test_table():
    assert table(results(), Tolerance(0.1, 0.5)) == TABLE


def test_verdicts_are_painted():
    painted = table(results(), Tolerance(0.1, 0.5), lambda text, colour: f"<{colour}>{text}").splitlines()
    assert painted[2].endswith("1  reference")
    assert painted[3].endswith("1  <red>FAIL: out of tolerance from step 2")


def test_json_and_csv(tmp_path):
    save_json(tmp_path / "a.json", results(), {"seed": 3})
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["seed"], content["passed"]) == (3, False)
    assert [level["level"] for level in content["levels"]] == ["O0", "O1 fp16"]
    assert content["levels"][1]["first_beyond"] == 2
    assert content["levels"][1]["steps"][2]["loss"] == "nan"
    assert content["levels"][1]["steps"][1]["deviation"] == 0.5
    save_csv(tmp_path / "a.csv", results())
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["level"], row["step"]) for row in rows] == [(n, str(i)) for n in ("O0", "O1 fp16") for i in (1, 2, 3)]
    assert (rows[0]["deviation"], rows[4]["deviation"], rows[5]["loss"]) == ("", "0.5", "nan")
