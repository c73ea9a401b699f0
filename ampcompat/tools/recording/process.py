"""The process of a recorded script: started, followed through its journal, and ended whatever it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

POLL_SECONDS = 0.05
#: What a script may take to leave after its last step, and after being told to.
GRACE_SECONDS = 10.0


def command(journal: Path, steps: int, skips: Sequence[int], target: Sequence[str]) -> list[str]:
    """The command line that runs ``target``, and records ``steps`` optimizer steps of it in ``journal``.

    Args:
        journal: The file to write.
        steps: Optimizer steps after which the script is ended.
        skips: The numbers of steps that are skipped as after an overflow.
        target: ``[script, args…]`` or ``["-m", module, args…]``.
    """
    settings = [str(journal), str(steps), ",".join(map(str, skips))]
    return [sys.executable, "-m", "ampcompat.tools.recording.child", *settings, *target]


#: What asks for other tools in each process that imports amp: a recorded run has none of them.
_OTHER_TOOLS = ("AMPCOMPAT_EXPLAIN", "AMPCOMPAT_REPORT")


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's variables with ``changes`` for a recorded one: output at once, hashes fixed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_TOOLS}
    return {**inherited, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **changes}


def follow(
    words: Sequence[str],
    variables: Mapping[str, str],
    journal: Path,
    log: Path,
    on_line: Callable[[str, Any], None],
    must_end: Callable[[float], bool],
) -> int | None:
    """Run the command ``words`` and hand on each line that it writes to ``journal``.

    However this ends, with Ctrl-C too, the process and whatever it started and left behind are gone then.

    Args:
        words: What :func:`command` made.
        variables: Its environment.
        journal: The file that it writes.
        log: The file for its output.
        on_line: Called with kind and content of each line.
        must_end: Called now and then with the seconds since the last line; true ends the process.

    Returns:
        Its exit status; None if it had to be ended.
    """
    journal.write_text("")
    with journal.open(encoding="utf-8") as lines, _started(words, variables, log) as process:
        return _read(process, lines, on_line, must_end)


def _read(
    process: subprocess.Popen[bytes],
    lines: TextIO,
    on_line: Callable[[str, Any], None],
    must_end: Callable[[float], bool],
) -> int | None:
    last = time.monotonic()
    rest = ""
    while True:
        code = process.poll()  # asked before reading: what an ended process wrote is all there
        rest += lines.read()
        *whole, rest = rest.split("\n")
        for line in whole:
            event = json.loads(line)
            on_line(event["kind"], event["content"])
            last = time.monotonic()
        if code is not None:
            return code
        if must_end(time.monotonic() - last):
            return None
        time.sleep(POLL_SECONDS)


@contextmanager
def _started(words: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process kindly, then, by force, whatever is left of it and of those it started."""
    _signal(process, "SIGTERM")
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _signal(process, "SIGKILL")
    process.wait()


def _signal(process: subprocess.Popen[bytes], kind: str) -> None:
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, getattr(signal, kind))
        except (ProcessLookupError, PermissionError):
            return
    elif process.poll() is None:
        process.terminate()
