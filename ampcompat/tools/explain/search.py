"""Search for what made a loss or gradients not finite: the watch is asked, or forwards are run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ampcompat.tools.core import Args, Kwargs, Optimizer, is_replica
from ampcompat.tools.explain.again import Finding, Forward, run_again
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.steps import BlockScale
from ampcompat.tools.explain.watch import Watch

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps whose forwards are run again.
MOST_RUN_AGAIN = 100


class Found(NamedTuple):
    """What a search has shown.

    Attributes:
        event: The origin; None where there is none.
        known: What is known where there is none, as sentences.
        was_watched: Whether the step was watched as it ran.
        was_looked_into: Whether there was anything to look at.
    """

    event: Event | None = None
    known: str = ""
    was_watched: bool = False
    was_looked_into: bool = True


class Search:
    """What a search can look at.

    Attributes:
        watch: The probe in the run.
        forwards: Forwards since the last step, the latest last.
        steps: How many steps of all optimizers have ended.
    """

    def __init__(self) -> None:
        self.watch = Watch()
        self.forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self.steps = 0
        self._left_to_run_again = MOST_RUN_AGAIN
        self._running: list[Forward | None] = []  # forwards that have begun; None for those that are not kept

    @property
    def number(self) -> int:
        """Of the step that is on, or to come, among those of all optimizers: from 1."""
        return self.steps + 1

    def begin_forward(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Keep references to what the outermost forward gets."""
        self.watch.given_to(model, args, kwargs)
        is_outermost = not any(self._running)
        is_kept = is_outermost and torch.is_grad_enabled() and not is_replica(model)
        if is_kept and not self.watch.is_on and self._left_to_run_again > 0:
            self._running.append(Forward(model, args, kwargs, self.steps))
        else:
            self._running.append(None)

    def end_forward(self, output: object) -> None:
        """Note what it has returned."""
        forward = self._running.pop() if self._running else None
        if forward is not None:
            forward.end(output)
            self.forwards.append(forward)

    def leave_forwards(self) -> None:
        """Note that no forward runs."""
        self._running.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        """Forget forwards that a backward has followed, and old ones; go on watching, or end that."""
        self.steps += 1
        kept = [one for one in self.forwards if not one.has_grads and self.steps - one.begun < OLDEST]
        self.forwards = deque(kept, MOST_FORWARDS)
        self.watch.after_step(optimizer)

    # -- looking -----------------------------------------------------------------------------------------------------
    def look(self, tensors: list[torch.Tensor], of_backward: bool, block: BlockScale) -> Found:
        """Find the origin of what is not finite in ``tensors``; where that is not known, watch the next steps.

        Args:
            tensors: A loss, or gradients.
            of_backward: Whether they are gradients.
            block: The block that they are of.
        """
        if self.watch.is_on:
            event = self.watch.origin(tensors)
            return Found(event, "" if event is not None else self._what_the_watch_shows(tensors), was_watched=True)
        if self._left_to_run_again <= 0 and self.watch.arm() == 0:
            return Found(was_looked_into=False)
        self._left_to_run_again -= 1
        known = ""
        findings = []
        try:
            for forward in self._forwards_of(of_backward):
                finding = run_again(forward, of_backward)
                if finding.event is not None:
                    return Found(finding.event)
                findings.append(finding)
        except Exception as error:  # the run that is observed must go on whatever happens here
            known = f" The batch could not be run again: {type(error).__name__}: {error}."
        return Found(known=(known or _what_is_known(findings, of_backward, block)) + self.watch_next())

    def watch_next(self) -> str:
        """Watch the next steps; says so."""
        steps = self.watch.arm()
        return f" The next steps, {steps} at most, are watched as they run." if steps else ""

    def _forwards_of(self, backward: bool) -> list[Forward]:
        """The forwards that can be run again as they were; for a loss, first those that no backward has followed."""
        followed = [forward for forward in self.forwards if forward.has_grads]
        others = [] if backward else [forward for forward in self.forwards if not forward.has_grads]
        return [forward for forward in (*others, *followed) if forward.is_as_it_was]

    def _what_the_watch_shows(self, tensors: list[torch.Tensor]) -> str:
        if self.watch.is_of_another_rank(tensors):
            return " It came with the gradients of another rank."
        return (
            " The step was watched as it ran, and no op shows why. Ops in CUDA graphs and in DataParallel are not"
            " seen: start the script once without graphs, on one device (CUDA_VISIBLE_DEVICES=0)."
        )


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
    reached = max(finding.largest for finding in findings)
    return f" Its {which} run again and stayed finite, with results up to {reached:.3g}."
