"""One level in a process of its own, followed step by step, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.recording import process
from ampcompat.tools.recording.journal import End, read_step
from ampcompat.tools.recording.steps import Step


@dataclass(frozen=True)
class Options:
    """Hold the settings common to all levels.

    Attributes:
        target: ``[script, args…]`` or ``["-m", module, args…]``.
        steps: Optimizer steps after which a run is ended.
        seed: Of Python, numpy and torch, set before the script starts; also ``PYTHONHASHSEED``.
        timeout: Seconds without a step after which a run is ended, the import of torch not counted; 0: never.
    """

    target: Sequence[str]
    steps: int
    seed: int
    timeout: float


@dataclass
class Run:
    """The record of one level.

    Attributes:
        level: What ran.
        steps: What was recorded, in order.
        ending: ``"complete"`` (all steps asked for), ``"ended"`` (by itself before), ``"crashed"``, ``"stalled"``
            (stopped because there was no progress) or ``"interrupted"``.
        message: Why it ended early, in one line; empty for ``"complete"``.
        log: The file with the script's output.
        reference: A run of the reference that skipped the same steps; None where there is none.
    """

    level: Level
    steps: list[Step] = field(default_factory=list)
    ending: str = "complete"
    message: str = ""
    log: str | None = None
    reference: Run | None = None

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def is_comparable(self) -> bool:
        """Whether other runs can be compared with this one."""
        return self.ending in ("complete", "ended") and any(loss is not None for loss in self.losses)

    @property
    def skipped_steps(self) -> list[int]:
        """The numbers of the steps that an overflow cost."""
        return [step.step for step in self.steps if step.skipped]

    @property
    def first_not_finite(self) -> str | None:
        """Say where the loss first is not finite."""
        for step in self.steps:
            if step.is_lost:
                return f"loss {step.loss:g} at step {step.step}"
        return None

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the steps, the first left out: it pays for what happens once."""
        known = [step.seconds for step in self.steps if step.seconds is not None]
        return median(known) if known else None

    @property
    def peak_memory(self) -> int | None:
        """The largest memory of the run in bytes."""
        return max((step.memory for step in self.steps if step.memory is not None), default=None)


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

    command = process.command(journal, options.steps, options.seed, skips, options.target)
    variables = process.environment(options.seed, level.environment)
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
        if end and not made:
            hint = f"; {_why_no_step(end)}"
        run.message = f"no step for {options.timeout:g} s, ended {after}{hint}"
    elif code or end.get("error"):
        run.ending = "crashed"
        run.message = f"crashed {after}: {end.get('error') or _exit(code)}"
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
        name = names.get(-code, f"signal {-code}")
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit status {code}"
