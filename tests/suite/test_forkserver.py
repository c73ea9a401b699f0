"""The program in the place of ``sys.executable``: files, arguments, signals and the end are those of ``python``."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # of a tool of the tests

CODE = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MARK'], sys.stdin.read()); sys.exit('to stderr')"
FOR_EVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, os.getpid(), flush=True)
time.sleep(600)
"""


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_files_arguments_environment_and_status(warm_python, tmp_path):
    command = [warm_python.executable, "-c", CODE, "--flag", "a b"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MARK": "é"}, input="typed", capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == f"['-c', '--flag', 'a b'] {tmp_path} é typed\n"
    assert done.stderr == "to stderr\n"


@pytest.mark.parametrize("words", [["-m", "calendar", "2000"], ["-mcalendar", "2000"]], ids=" ".join)
def test_modules(warm_python, words):
    assert warm_python.run(words).stdout.split()[0] == "2000"


def test_a_process_that_kills_itself(warm_python):
    done = subprocess.run([warm_python.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert done.returncode == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc which processes there are")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_process_and_those_it_started(warm_python, number):
    with subprocess.Popen([warm_python.executable, "-c", FOR_EVER], stdout=subprocess.PIPE, text=True) as process:
        started = [int(word) for word in process.stdout.readline().split()]
        assert all(map(alive, started))
        process.send_signal(number)
        assert process.wait(60) == -number
    for _ in range(600):
        if not any(map(alive, started)):
            break
        time.sleep(0.1)
    assert not any(map(alive, started))


def test_a_process_that_takes_too_long(warm_python):
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run(["-c", "import time; time.sleep(600)"], timeout=1)
