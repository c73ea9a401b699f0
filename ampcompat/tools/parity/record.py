"""Hold a run's steps and its ending, and the lines by which a process hands them over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from ampcompat.tools.parity.levels import Level


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        step: Its number in the run, from 1, over all optimizers.
        optimizer: Which optimizer, from 0, in the order of their first steps.
        losses: The loss of each ``scale_loss`` block since the optimizer's last step, unscaled (mean, if not scalar).
        loss: Their sum; None without a block.
        scale: The smallest loss scale of these blocks; None without a block.
        grad_norm: 2-norm of the optimizer's unscaled gradients after its last block, before any clipping.
        skipped: Whether the step was skipped for an overflow.
        seconds: Since the step before, less what recording took; None for the first.
        memory: Largest memory so far in bytes: allocated on the GPU where one is used, else that of the process.
    """

    step: int
    optimizer: int
    losses: list[float]
    loss: float | None
    scale: float | None
    grad_norm: float | None
    skipped: bool
    seconds: float | None
    memory: int | None


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
    """

    level: Level
    steps: list[Step] = field(default_factory=list)
    ending: str = "complete"
    message: str = ""
    log: str | None = None


class End(TypedDict, total=False):
    """Tell how the script ended, and how far it came in its use of amp; no other line holds any of it.

    Attributes:
        error: What ended it, in one line; None at a normal end.
        initialized: Whether it called ``initialize``.
        enabled: Whether that was enabled.
        blocks: ``scale_loss`` blocks.
        children: Whether it started other processes.
    """

    error: str | None
    initialized: bool
    enabled: bool
    blocks: int
    children: bool


def plain(value: object) -> object:
    """``value`` with non-finite floats as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def to_line(kind: str, content: Mapping[str, object]) -> str:
    """One line of a record file."""
    return json.dumps(plain({"kind": kind, **content})) + "\n"


def step_line(step: Step) -> str:
    """The line of ``step``."""
    return to_line("step", asdict(step))


def read_line(line: str) -> tuple[str, Any]:
    """Kind and content of a line that :func:`to_line` made."""
    content = json.loads(line)
    return content.pop("kind"), content


def read_step(content: dict[str, Any]) -> Step:
    """The step that :func:`step_line` wrote."""
    numbers = {name: _number(content[name]) for name in ("loss", "scale", "grad_norm", "seconds")}
    return Step(**{**content, **numbers, "losses": [float(loss) for loss in content["losses"]]})


def _number(value: str | float | None) -> float | None:
    return None if value is None else float(value)
