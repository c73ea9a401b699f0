"""The forwards since the last step, kept to be run again: what spoils the weights at a static scale happens once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import torch

from ampcompat.tools.core import Args, Kwargs, is_replica
from ampcompat.tools.explain.again import Finding, Forward, run_again
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.steps import BlockScale

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps whose forwards are run again.
MOST_RUN_AGAIN = 100


class Forwards:
    """The forwards of initialized models since the last step."""

    def __init__(self) -> None:
        self.kept: deque[Forward] = deque(maxlen=MOST_FORWARDS)  # the latest last
        self._left_to_run_again = MOST_RUN_AGAIN
        self._running: list[Forward | None] = []  # that have begun; None for those that are not kept

    def begin(self, model: torch.nn.Module, args: Args, kwargs: Kwargs, is_watched: bool) -> None:
        """Keep references to what a forward gets, if it may have to be run again."""
        is_kept = torch.is_grad_enabled() and not is_replica(model) and not is_watched and self._left_to_run_again > 0
        self._running.append(Forward(model, args, kwargs) if is_kept else None)

    def end(self, output: object) -> None:
        """Note what it has returned."""
        forward = self._running.pop() if self._running else None
        if forward is not None:
            forward.end(output)
            self.kept.append(forward)

    def leave(self) -> None:
        """Note that no forward runs: an exception has left it."""
        self._running.clear()

    def after_step(self) -> None:
        """Forget forwards that a backward has followed, and old ones."""
        for forward in self.kept:
            forward.age += 1
        kept = [forward for forward in self.kept if not forward.has_grads and forward.age < OLDEST]
        self.kept = deque(kept, MOST_FORWARDS)

    def find(self, of_backward: bool, is_nan: bool, block: BlockScale) -> tuple[Event | None, str]:
        """Find the origin of a loss, or of gradients, that is not finite, by running forwards again.

        Args:
            of_backward: Whether it is of gradients.
            is_nan: Whether it is a loss that is NaN, which a mask of -inf alone does not make.
            block: The block that they are of.

        Returns:
            The origin, or what is known where none is found, as sentences; "" where no more are run again.
        """
        if self._left_to_run_again <= 0:
            return None, ""
        self._left_to_run_again -= 1
        findings = []
        try:
            for forward in self.kept:
                if not forward.is_as_it_was or (of_backward and not forward.has_grads):
                    continue
                finding = run_again(forward, of_backward)
                if finding.event is not None and not (is_nan and finding.is_mask):
                    return finding.event, ""
                findings.append(finding)
        except Exception as error:  # the run that is observed must go on whatever happens here
            return None, f" The batch could not be run again: {type(error).__name__}: {error}."
        return None, _what_is_known(findings, of_backward, block)

    def find_in_latest(self) -> Event | None:
        """Find the origin of what the latest forward has returned and is not finite; None where it is, or a mask's."""
        latest = self.kept[-1] if self.kept else None
        if latest is None or not latest.is_lost or not latest.is_as_it_was:
            return None
        with contextlib.suppress(Exception):  # the run has ended, and that well
            finding = run_again(latest, backward=False)
            return None if finding.is_mask else finding.event
        return None


def _what_is_known(findings: Sequence[Finding], of_backward: bool, block: BlockScale) -> str:
    """What is known where no forward that was run again is the cause."""
    if not findings or any(finding.differs for finding in findings):
        return " Its forward could not be run again as it was."
    if any(finding.entered for finding in findings):
        known = " The gradient that came into the model was not finite already: the code after the model made it."
        if not block.scaler.dynamic and not block.scaler.is_one:
            known += f" The loss scale of {block.scale:g} may be too high for it: a lower one shows."
        return known
    count = len(findings)
    if of_backward:
        which = "forward and backward were" if count == 1 else f"{count} forwards and their backwards were"
        return f" Its {which} run again and stayed finite."
    which = "forward was" if count == 1 else f"{count} forwards were"
    if any(finding.is_mask for finding in findings):
        return f" Its {which} run again and gave nothing that is not finite but a mask's -inf."
    reached = max(finding.largest for finding in findings)
    return f" Its {which} run again and stayed finite, with results up to {reached:.3g}."
