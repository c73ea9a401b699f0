"""Hold the record of one level."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.recording.events import Step


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

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """The numbers of the steps that an overflow cost."""
        return tuple(step.step for step in self.steps if step.skipped)

    @property
    def first_not_finite(self) -> str | None:
        """Say where the loss first is not finite."""
        for step in self.steps:
            if step.loss is not None and not math.isfinite(step.loss):
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
