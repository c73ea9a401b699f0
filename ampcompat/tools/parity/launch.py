"""One level in a process of its own, followed step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompat.tools.parity.ending import describe
from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.record import Run
from ampcompat.tools.recording import process
from ampcompat.tools.recording.events import End, Step
from ampcompat.tools.recording.journal import Settings


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
    journal = folder / f"{name}.jsonl"
    log = folder / f"{name}.log"
    run = Run(level, log=str(log))
    notes: dict[str, End] = {}

    def on_line(kind: str, content: Any) -> None:
        if kind == "step":
            del content["place"]
            run.steps.append(Step(**content))
            on_step(run.steps[-1])
        else:
            notes[kind] = content

    def must_end(waited: float) -> bool:
        if len(run.steps) >= options.steps:
            return waited > process.GRACE_SECONDS
        if not options.timeout or waited <= options.timeout or "ready" not in notes:
            return False
        notes["stalled"] = {}
        return True

    settings = Settings(str(journal), options.steps, options.seed, skips)
    command = process.command(settings, options.target)
    code: int | None = None
    try:
        code = process.follow(command, _environment(level, options), journal, log, on_line, must_end)
    except KeyboardInterrupt:
        notes["interrupted"] = {}
    run.ending, run.message = describe(run, options.steps, options.timeout, code, notes)
    return run


def _environment(level: Level, options: Options) -> dict[str, str]:
    variables = process.environment(options.seed, without=("AMPCOMPAT_OPT_LEVEL", "AMPCOMPAT_DTYPE").__contains__)
    variables.update(level.environment)
    if options.keep_fp32 is not None:
        variables["AMPCOMPAT_KEEP_FP32"] = options.keep_fp32
    return variables
