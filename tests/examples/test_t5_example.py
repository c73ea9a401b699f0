"""T5's trouble with float16: activations beyond 65504. One script, unchanged; only its surroundings differ."""

import json
from pathlib import Path

import pytest
from python_process import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "t5.py"


@pytest.fixture
def run():
    def start(*options, **variables):
        command = ["-m", "ampcompat", "run", *options, SCRIPT, "--steps", "40", "--device", "cpu"]
        done = run_python(command, variables=variables)
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout, json.loads(done.stdout.splitlines()[-1])

    return start


def test_float16_overflows_and_explain_names_wo(run):
    said, result = run("--explain")
    assert result["finite"] == 0
    assert "Gradient overflow" not in said  # the script asks for verbosity=0
    assert said.count("ampcompat explain: ") == 2  # with the verdict
    assert "block.1.wo" in said
    assert "self.wo(forwarded)" in said


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bfloat16_trains(level, run):
    said, result = run(AMPCOMPAT_DTYPE="bfloat16", AMPCOMPAT_OPT_LEVEL=level)
    assert result["finite"] == result["steps"] == 40
    assert result["last"] < 0.1  # from ln 32 = 3.5
    assert "Gradient overflow" not in said


@pytest.mark.slow
def test_wo_in_float32_trains(run):
    said, result = run("--keep-fp32", "*.wo")
    assert "keeps block.0.wo, block.1.wo in float32" in said
    assert result["finite"] == result["steps"]
    assert result["last"] < 0.1
