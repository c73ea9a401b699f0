"""Run Python in a process of its own, for tests of what a process prints, imports or ends with."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parent
#: ``PYTHONPATH`` of processes that import the package, and what the tests share, such as ``internals``.
PATH_WITH_TESTS = os.pathsep.join([str(TESTS.parent), str(TESTS)])
#: Seconds until a process is killed by default. It ends a process that hangs; a busy machine stays far below it.
LIMIT = 900


def run_python(
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: int = LIMIT,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` with one thread and an empty standard input, and return what it printed.

    The process is forked from one that has imported torch (``warm_python.py``), which saves seconds.

    Args:
        arguments: What follows the name of the interpreter: a script, or ``-c`` or ``-m``, and its arguments.
        cwd: The folder to run in; by default this process's.
        variables: Environment variables beside those of this process. ``PYTHONPATH`` leads to the package and to what
            the tests share, unless it is given.
        timeout: Seconds until the process is killed.
        fresh: Start an interpreter instead. A test needs it if it is about what is imported, about options of the
            interpreter, about ``python -m`` itself, about processes that are spawned, or about a variable that
            Python or torch reads when it starts.

    Raises:
        subprocess.TimeoutExpired: The process was killed.
    """
    words = [str(argument) for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": PATH_WITH_TESTS, **(variables or {})}
    environment.setdefault("OMP_NUM_THREADS", "1")  # the processes of other tests need the cores as well
    if hasattr(os, "fork") and not fresh:
        return warm_python().run(words, str(cwd or Path.cwd()), environment, timeout)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    done.stderr = without_leaks_of_triton(done.stderr)
    return done


def without_leaks_of_triton(errors: str) -> str:
    """Cut off what triton prints as each process on Python 3.15 ends: a list of its own objects that leaked."""
    return errors.partition("nanobind: leaked ")[0]


class WarmPython:
    """The process of ``warm_python.py``: it forks for each program."""

    def __init__(self) -> None:
        # Each program has a PYTHONPATH of its own.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "warm_python.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(self.end)

    def run(
        self, words: list[str], cwd: str, environment: dict[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        """Run one program to its end."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            request = {"arguments": words, "cwd": cwd, "environment": environment, "out": out.name, "err": err.name}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            pid = int(self.process.stdout.readline())
            status = self.status_within(timeout, words, pid)
            printed, errors = (file.read().decode() for file in (out, err))
        return subprocess.CompletedProcess([sys.executable, *words], status, printed, without_leaks_of_triton(errors))

    def status_within(self, timeout: int, words: list[str], pid: int) -> int:
        """Return the status of a program, or kill it and its children after ``timeout`` seconds."""
        was_killed = threading.Event()

        def kill() -> None:
            was_killed.set()
            os.killpg(pid, signal.SIGKILL)

        timer = threading.Timer(timeout, kill)
        timer.start()
        status = int(self.process.stdout.readline())
        timer.cancel()
        timer.join()
        if was_killed.is_set():
            raise subprocess.TimeoutExpired(words, timeout)
        return status

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@functools.cache
def warm_python() -> WarmPython:
    """Return the one of this worker, started with its first program."""
    return WarmPython()
