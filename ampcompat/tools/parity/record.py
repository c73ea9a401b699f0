"""Hold the record of one level."""

from __future__ import annotations

from dataclasses import dataclass, field

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
