"""The example of docs/debugging.md: the first cause has one name, whatever the machine computes with."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from ampcompat._torch import TORCH

ROOT = Path(__file__).parents[3]
#: Instructions that torch and oneDNN are told to leave alone, as an older processor has them not.
MACHINES = {
    "this one": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def without_figures(text):
    """``text`` without its numbers; whether a tensor has zeros is a number, too."""
    text = re.sub(r"\d[\d.]*(e[+-]\d+)?", "N", text)
    return re.sub(r", N of N (is|are) N(?=[,\n])", "", text)


@pytest.mark.skipif(Version("2.5") > TORCH, reason="the page shows what torch 2.5 and newer print")
@pytest.mark.parametrize(
    "machine", ["this one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("AVX2", "SSE"))]
)
def test_the_page_shows_what_is_printed(machine):
    page = (ROOT / "docs" / "debugging.md").read_text()
    command, shown = re.search(r"\$ ampcompat (run --explain .*digits.*)\n((?:.*\n)*?)```", page).groups()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **MACHINES[machine]}
    words = [sys.executable, "-m", "ampcompat", *shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert without_figures(done.stderr) == without_figures(shown)
