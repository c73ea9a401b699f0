"""Explain and the precision report on unedited scripts in the manner of well-known apex users."""

import json
from pathlib import Path

import pytest
from python_process import run_python

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests" / "legacy" / "scripts"


@pytest.mark.parametrize(
    ("script", "level", "half_share"),
    [
        ("dcgan", "O2", 0.9),
        ("bert_pretraining", "O0", 0.0),
        pytest.param("imagenet", "O1", 0.9, marks=pytest.mark.slow),
        pytest.param("hf_trainer", "O1", 0.9, marks=pytest.mark.slow),
    ],
)
def test_run_with_both(script, level, half_share, tmp_path):
    report = tmp_path / "report.json"
    command = ["-m", "ampcompat", "run", "--explain", f"--report={report}", "--opt-level", level]
    done = run_python([*command, SCRIPTS / f"{script}.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wrote the precision report" in done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["opt_level"] == level
    if half_share:
        assert found["half_flops_share"] >= half_share
    else:
        assert found["half_flops_share"] == 0
        assert found["sentences"], "nothing ran in half, and nobody said so"
    assert found["skipped"] == (done.stdout + done.stderr).count("Gradient overflow.  Skipping step")
