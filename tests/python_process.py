"""Run Python in a process of its own, for tests of what a process prints, imports or ends with."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parent
#: ``PYTHONPATH`` of processes that import what the tests share, such as ``internals``.
PATH_WITH_TESTS = os.pathsep.join([str(TESTS.parent), str(TESTS)])


def run_python(
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` with one thread and an empty standard input, and return what it printed.

    Args:
        arguments: Those after the name of the interpreter.
        cwd: The folder to run in; by default this process's.
        env: The whole environment; by default this process's.
        timeout: Seconds until the process is killed.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    environment = dict(os.environ if env is None else env)
    environment.setdefault("OMP_NUM_THREADS", "1")  # the processes of other tests need the cores as well
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
