"""The comparison: a training at O0 and at each level, and once more at O0 for a level that skipped steps.

``ampcompat parity`` runs scripts in processes of their own (:mod:`.scripts`), ``assert_opt_level_parity`` a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.recording.steps import Step


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
        returned: The losses that a function has returned; None where those of the steps count.
        reference: A run of the reference that skipped the same steps; None where there is none.
    """

    level: Level
    steps: list[Step] = field(default_factory=list)
    ending: str = "complete"
    message: str = ""
    log: str | None = None
    returned: list[float] | None = None
    reference: Run | None = None

    @property
    def losses(self) -> list[float | None]:
        """The losses that are compared: one a step, unless a function has returned others."""
        return [*self.returned] if self.returned is not None else [step.loss for step in self.steps]

    @property
    def is_comparable(self) -> bool:
        """Whether other runs can be compared with this one."""
        return self.ending in ("complete", "ended") and any(loss is not None for loss in self.losses)

    @property
    def skipped_steps(self) -> list[int]:
        """The numbers of the steps that an overflow cost."""
        return [step.step for step in self.steps if step.skipped]

    @property
    def is_mostly_skipped(self) -> bool:
        """Whether more than half of the steps were skipped: too few updates are left to compare."""
        return 2 * len(self.skipped_steps) > len(self.steps)

    @property
    def first_not_finite(self) -> str | None:
        """Say where the loss first is not finite."""
        for number, loss in enumerate(self.losses, start=1):
            if loss is not None and not math.isfinite(loss):
                return f"loss {loss:g} at step {number}"
        return None


def run_all(levels: Sequence[Level], run: Callable[[Level, Sequence[int]], Run]) -> list[Run]:
    """Run all ``levels``, the first of which is the reference.

    A level that skipped steps, and made others, gets a run of the reference that skips the same: they cost it an update
    each, which is the price of finding the loss scale and no loss of precision.

    Args:
        levels: What to run.
        run: Runs a level, with steps of these numbers skipped as after an overflow.

    Returns:
        The runs; none after an interrupted one, or after a reference that is of no use.
    """
    runs: list[Run] = []
    with_skips: dict[tuple[int, ...], Run] = {}
    for level in levels:
        made = run(level, ())
        runs.append(made)
        if made.ending == "interrupted" or not runs[0].is_comparable:
            break
        skips = tuple(made.skipped_steps)
        if skips == tuple(runs[0].skipped_steps) or made.is_mostly_skipped:
            continue
        if skips not in with_skips:
            with_skips[skips] = run(levels[0], skips)
        reference = with_skips[skips]
        if reference.ending == "interrupted":
            made.ending = "interrupted"
            break
        made.reference = reference if reference.is_comparable else None
    return runs
