"""One level in a process of its own: started, followed through its record, and ended whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ampcompat.tools.parity.ending import describe
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.record import End, Run, Step, read_line, read_step

POLL_SECONDS = 0.05
#: What a script may take to leave after its last step, and after being told to.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """Hold the settings common to all levels.

    Attributes:
        target: ``[script, args…]`` or ``["-m", module, args…]``.
        steps: Optimizer steps after which a run is ended.
        seed: Of Python, numpy and torch, set before the script starts; also ``PYTHONHASHSEED``.
        timeout: Seconds without a step after which a run is ended, the import of torch not counted; 0: never.
        keep_fp32: Patterns of modules that stay float32; None leaves ``AMPCOMPAT_KEEP_FP32`` as it is.
    """

    target: Sequence[str]
    steps: int
    seed: int
    timeout: float
    keep_fp32: str | None = None


def run_level(
    level: Level, options: Options, folder: Path, on_step: Callable[[Step], None], skips: Sequence[int] = ()
) -> Run:
    """Run the script at ``level``, its output in a log in ``folder``; ``on_step`` is called with every step.

    Steps numbered ``skips`` are skipped as after an overflow.

    Returns:
        The record, however the run ended; one that Ctrl-C ended has the ending ``"interrupted"``.
    """
    name = level.name.replace(" ", "-") + (f"-skipping-{len(skips)}-from-{skips[0]}" if skips else "")
    run = Run(level, log=str(folder / f"{name}.log"))
    record = folder / f"{name}.jsonl"
    record.write_text("")
    notes: dict[str, End] = {}
    code: int | None = None
    with _started(level, options, record, Path(str(run.log)), skips) as process, record.open(encoding="utf-8") as lines:
        try:
            code = _follow(process, lines, options, run, notes, on_step)
        except KeyboardInterrupt:
            notes["interrupted"] = {}
    run.ending, run.message = describe(run, options.steps, options.timeout, code, notes)
    return run


def _follow(
    process: subprocess.Popen[bytes],
    lines: TextIO,
    options: Options,
    run: Run,
    notes: dict[str, End],
    on_step: Callable[[Step], None],
) -> int | None:
    """Read the record until the process ends or must be ended; its exit status, None if it is still there."""
    last, rest = time.monotonic(), ""
    while True:
        code = process.poll()  # asked before reading: what an ended process wrote is all there
        rest += lines.read()
        *whole, rest = rest.split("\n")
        for line in whole:
            kind, content = read_line(line)
            if kind == "step":
                run.steps.append(read_step(content))
                on_step(run.steps[-1])
            else:
                notes[kind] = content
            last = time.monotonic()
        if code is not None:
            return code
        waited = time.monotonic() - last
        if len(run.steps) >= options.steps:
            if waited > GRACE_SECONDS:
                return None
        elif options.timeout and waited > options.timeout and "ready" in notes:
            notes["stalled"] = {}
            return None
        time.sleep(POLL_SECONDS)


@contextmanager
def _started(
    level: Level, options: Options, record: Path, log: Path, skips: Sequence[int]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process; at the end of the block it and whatever it started and left behind are gone."""
    environment = {k: v for k, v in os.environ.items() if k not in ("AMPCOMPAT_OPT_LEVEL", "AMPCOMPAT_DTYPE")}
    environment.update(level.environment, PYTHONHASHSEED=str(options.seed % 2**32), PYTHONUNBUFFERED="1")
    if options.keep_fp32 is not None:
        environment["AMPCOMPAT_KEEP_FP32"] = options.keep_fp32
    command = [sys.executable, "-m", "ampcompat.tools.parity.child", "--record", str(record)]
    command += ["--skips", ",".join(map(str, skips))] if skips else []
    command += ["--steps", str(options.steps), "--seed", str(options.seed), "--", *options.target]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
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
