"""How a run ended, in one line that names what to do about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from ampcompat.tools.parity.record import Run
from ampcompat.tools.recording.events import End


def describe(run: Run, wanted: int, timeout: float, code: int | None, notes: Mapping[str, End]) -> tuple[str, str]:
    """Ending and message of ``run``.

    Args:
        run: The run, with its steps.
        wanted: Steps asked for.
        timeout: Seconds without a step that were allowed.
        code: Exit status of the process; None if it had to be ended.
        notes: What the record holds beside steps, and what was noticed from outside, by kind; empty but for the end.
    """
    made = len(run.steps)
    end = notes.get("end", End())
    if made >= wanted:
        return "complete", "" if any(step.losses for step in run.steps) else _NO_LOSS
    if "interrupted" in notes:
        return "interrupted", f"interrupted after {made} of {wanted} steps"
    if "stalled" in notes:
        hint = "" if made else f"; {_without_steps(end, notes)}" if end else _NO_STEP_YET
        return "stalled", f"no step for {timeout:g} s, ended after {made} of {wanted} steps{hint}"
    if code or end.get("error"):
        return "crashed", f"crashed after {made} of {wanted} steps: {end.get('error') or _exit(code)}"
    if made:
        return "ended", f"the script ended by itself after {made} of {wanted} steps"
    return "ended", _without_steps(end, notes)


_NO_LOSS = "no loss was seen: optimizer.step() was called, amp.scale_loss never - scale the loss in a scale_loss block"
_NO_STEP_YET = "; raise --timeout if the script is just slow to start"
_CHILDREN = (
    "; it started other processes, and only the one that is started here is recorded - have it train in one process"
)


def _without_steps(end: End, notes: Mapping[str, End]) -> str:
    """Why a script that ran to its end made no step."""
    if "forked" in notes:
        return f"no step was made in the script's own process{_CHILDREN}"
    children = _CHILDREN if end.get("children") else ""
    if not end.get("initialized"):
        return f"the script never called amp.initialize{children}"
    if not end.get("enabled"):
        return "the script called amp.initialize with enabled=False - switch its mixed precision on"
    if not end.get("blocks"):
        return f"the script called neither amp.scale_loss nor optimizer.step(){children}"
    return f"the script called amp.scale_loss {end['blocks']} times and optimizer.step() never{children}"


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        names = {int(one): one.name for one in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit status {code}"
