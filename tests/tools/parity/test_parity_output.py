import json
import math

from parity_runs import run

from ampcompat.tools.parity.compare import Tolerance, judge
from ampcompat.tools.parity.save import save_json
from ampcompat.tools.parity.table import table


def results():
    o1 = run("O1", [1.0, 1.5, math.nan], "float16", scale=65536.0)
    return judge([run("O0", [1.0, 1.0, 1.0]), o1], Tolerance(0.1))


TABLE = """\
level    steps  max dev  mean dev  first beyond  skipped  verdict
-------  -----  -------  --------  ------------  -------  ----------------------------------
O0           3        -         -             -        0  reference
O1 fp16      3      inf       inf             2        0  FAIL: out of tolerance from step 2

dev: |loss - O0's| / |O0's|; beyond: |loss - O0's| > 0.1 x |O0's| + 0.5

step  O0  O1 fp16 (rel. dev.)
   1   1          1 (0.0e+00)
 > 2   1        1.5 (5.0e-01)
   3   1            nan (inf)"""


def test_table():
    assert table(results(), Tolerance(0.1, 0.5)) == TABLE


def test_verdicts_are_painted():
    painted = table(results(), Tolerance(0.1, 0.5), lambda text, colour: f"<{colour}>{text}").splitlines()
    assert painted[2].endswith("0  reference")
    assert painted[3].endswith("0  <red>FAIL: out of tolerance from step 2")


def test_json(tmp_path):
    save_json(tmp_path / "a.json", results(), {"seed": 3})
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["seed"], content["passed"]) == (3, False)
    assert [level["level"] for level in content["levels"]] == ["O0", "O1 fp16"]
    assert content["levels"][1]["first_beyond"] == 2
    assert content["levels"][1]["steps"][2]["loss"] == "nan"
    assert content["levels"][1]["steps"][1]["deviation"] == 0.5
