"""A user's script infers the user's own classes, and mistakes are refused: mypy, and pyright where it is there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = [str(HERE / "script_well_typed.py"), str(HERE / "script_badly_typed.py")]
MISTAKES = {n for n, line in enumerate(Path(SCRIPTS[1]).read_text().splitlines(), 1) if line.endswith("# error")}


def mypy_errors(folder):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--follow-imports=silent"]
    command += ["--cache-dir", str(folder), "--show-absolute-path", *SCRIPTS]
    done = subprocess.run(command, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return [(file, int(line), text) for file, line, text in found]


def pyright_errors(folder):
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not there")
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, *SCRIPTS]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = json.loads(shown)["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    return [(one["file"], one["range"]["start"]["line"] + 1, one["message"]) for one in errors]


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy_errors, pyright_errors])
def test_a_script_of_a_user(checker, tmp_path):
    errors = checker(tmp_path)
    assert [error for error in errors if error[0] == SCRIPTS[0]] == []
    assert {line for file, line, _ in errors if file == SCRIPTS[1]} == MISTAKES
