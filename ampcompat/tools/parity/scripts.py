"""A script at one level in a process of its own, followed step by step, and how it ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording import process
from ampcompat.tools.recording.journal import End, read_step


@dataclass(frozen=True)
class Options:
    """Hold the settings common to all levels.

    Attributes:
        target: ``[script, args…]`` or ``["-m", module, args…]``.
        steps: Optimizer steps after which a run is ended.
        timeout: Seconds without a step after which a run is ended, the import of torch not counted; 0: never.
    """

    target: Sequence[str]
    steps: int
    timeout: float


def run_level(
    level: Level,
    options: Options,
    folder: Path,
    *,
    skips: Sequence[int] = (),
    on_step: Callable[[int], object] = lambda number: None,
) -> Run:
    """Run the script at ``level``, its output in a log in ``folder``.

    Args:
        level: What to run.
        options: The settings.
        folder: For the log and the journal.
        skips: The numbers of steps that are skipped as after an overflow.
        on_step: Called with the number of each step when it is recorded.

    Returns:
        The record, however the run ended; one that Ctrl-C ended has the ending ``"interrupted"``.
    """
    name = level.name.replace(" ", "-")
    if skips:
        name += f"-without-{'-'.join(map(str, skips))}"[:100]
    journal = folder / f"{name}.jsonl"
    log = folder / f"{name}.log"
    run = Run(level, log=str(log))
    seen: dict[str, Any] = {}

    def on_line(kind: str, content: Any) -> None:
        seen[kind] = content
        if kind == "step":
            run.steps.append(read_step(content))
            on_step(len(run.steps))

    def must_end(waited: float) -> bool:
        if len(run.steps) >= options.steps:
            return waited > process.GRACE_SECONDS
        stalled = bool(options.timeout) and waited > options.timeout and "ready" in seen
        if stalled:
            run.ending = "stalled"
        return stalled

    command = process.command(journal, options.steps, skips, options.target)
    variables = process.environment(level.environment)
    code: int | None = None
    try:
        code = process.follow(command, variables, journal, log, on_line, must_end)
    except KeyboardInterrupt:
        run.ending = "interrupted"
    _describe(run, options, code, seen.get("end", End()))
    return run


_NO_LOSS = "no loss was seen: optimizer.step() was called, amp.scale_loss never - scale the loss in a scale_loss block"
_CHILDREN = (
    "; it started other processes, and only the one that is started here is recorded - have it train in one process"
)
#: How an error names a variable that torchrun sets.
_LACKS_VARIABLE = re.compile(r"\b(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\b")
_OF_TORCHRUN = (
    " - set those of torchrun, for one process: RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1"
    " MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ampcompat parity ..."
)


def _describe(run: Run, options: Options, code: int | None, end: End) -> None:
    """Say how ``run`` ended, in one line that names what to do about it.

    Args:
        run: The run, with its steps.
        options: What was asked for.
        code: Exit status of the process; None if it had to be ended.
        end: What the journal says of the end; empty where it has none.
    """
    made = len(run.steps)
    after = f"after {made} of {options.steps} steps"
    if run.ending == "interrupted":
        run.message = f"interrupted {after}"
    elif made >= options.steps:
        run.ending = "complete"
        run.message = "" if any(step.losses for step in run.steps) else _NO_LOSS
    elif run.ending == "stalled":
        hint = "" if made else "; raise --timeout if the script is just slow to start"
        run.message = f"no step for {options.timeout:g} s, ended {after}{hint}"
    elif code or end.get("error"):
        run.ending = "crashed"
        error = end.get("error") or _exit(code)
        run.message = f"crashed {after}: {error}{_OF_TORCHRUN if _LACKS_VARIABLE.search(error) else ''}"
    else:
        run.ending = "ended"
        run.message = f"the script ended by itself {after}" if made else _why_no_step(end)


def _why_no_step(end: End) -> str:
    """Why a script that ran to its end made no step."""
    children = _CHILDREN if end.get("children") else ""
    unused = end.get("unused", "")
    blocks = end.get("blocks", 0)
    if unused:
        return f"{unused}{children}"
    if not blocks:
        return f"the script called neither amp.scale_loss nor optimizer.step(){children}"
    return f"the script called amp.scale_loss {blocks} times and optimizer.step() never{children}"


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        names = {int(one): one.name for one in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"
    return f"exit status {code}"


#: How Python shows a warning that is about what the script does.
_WARNING = re.compile(r"^.+:\d+: UserWarning: .+$", re.MULTILINE)


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """The UserWarnings in the outputs of ``runs``, each once: they often name the cause of what is off."""
    found: list[str] = []
    for run in runs:
        if run.log is not None:
            found += _WARNING.findall(Path(run.log).read_text(encoding="utf-8", errors="replace"))
    return [*dict.fromkeys(found)]
