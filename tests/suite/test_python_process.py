"""A program that ``run_python`` forks finds what one in a fresh interpreter does, and ends as it does."""

import subprocess

import pytest
from python_process import run_python

PROGRAM = """
import os, sys, warnings
print(sys.argv, __name__, __file__ if "__file__" in globals() else None, sys.path)
print(sys.modules["__main__"].__dict__ is globals(), os.getcwd(), sorted({*os.environ} - {"LC_CTYPE"}))
print(warnings.filters[:1], sys.stdin.read() == "")
print("to errors", file=sys.stderr)
"""
ENDS = {
    "status": "import sys; sys.exit(3)",
    "exception": "import atexit; atexit.register(print, 'at exit'); raise ValueError('inside')",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "raise KeyboardInterrupt",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
}


def both(tmp_path, arguments):
    variables = {"PYTHONPATH": str(tmp_path / "elsewhere"), "PYTHONWARNINGS": "ignore::UserWarning", "NEW": "1"}
    return [run_python(arguments, cwd=tmp_path, variables=variables, fresh=fresh) for fresh in (True, False)]


@pytest.mark.parametrize("way", ["script", "-c", "-m"])
def test_what_a_program_finds(way, tmp_path):
    folder = tmp_path / "scripts" if way == "script" else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    arguments = {"script": ["scripts/program.py"], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}[way]
    fresh, warm = both(tmp_path, [*arguments, "--flag", "x"])
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, fresh.stdout, "to errors\n")


@pytest.mark.parametrize("end", ENDS)
def test_how_a_program_ends(end, tmp_path):
    fresh, warm = both(tmp_path, ["-c", ENDS[end]])
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)
    assert warm.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_program_that_hangs_is_killed(fresh):
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(600)"], timeout=1, fresh=fresh)
    assert run_python(["-c", "print(1)"], fresh=fresh).stdout == "1\n"


def test_torch_is_there_and_ampcompat_is_not():
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('ampcompat')])"
    assert run_python(["-c", code]).stdout == "True []\n"
    assert run_python(["-c", "import torch; print(torch.get_num_threads())"]).stdout == "1\n"


@pytest.mark.parametrize("draw", ["random.random()", "numpy.random.rand()", "torch.rand(1).item()"])
def test_programs_share_no_random_numbers(draw):
    code = f"import numpy, random, torch; print({draw})"
    assert run_python(["-c", code]).stdout != run_python(["-c", code]).stdout
