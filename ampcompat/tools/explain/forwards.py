"""The forwards since the last step, kept to be run again: what spoils the weights at a static scale happens once."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from ampcompat.tools.core import Args, Kwargs, is_replica
from ampcompat.tools.explain.again import ANOTHER, Finding, Forward, run_again
from ampcompat.tools.explain.birth import Birth

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

    def find(self, of_backward: bool, is_nan: bool) -> Finding:
        """Find the birth of a loss, or of gradients, that is not finite, by running forwards again.

        Args:
            of_backward: Whether it is of gradients.
            is_nan: Whether it is a loss that is NaN, which a mask of -inf alone does not make.
        """
        if self._left_to_run_again <= 0:
            return Finding(None, f"forwards of {MOST_RUN_AGAIN} lost steps were run again, and no more are")
        self._left_to_run_again -= 1
        latest = Finding(None, ANOTHER)
        try:
            for forward in self.kept:
                if not forward.is_as_it_was or (of_backward and not forward.has_grads):
                    continue
                latest = run_again(forward, of_backward)
                if latest.birth is not None and not (is_nan and latest.birth.is_mask):
                    return latest
        except Exception as error:  # the run that is observed must go on whatever happens here
            return Finding(None, f"its forward could not be run again: {type(error).__name__}: {error}")
        return latest._replace(birth=None)

    def find_in_latest(self) -> Birth | None:
        """Find the birth of what the latest forward has returned and is not finite; None where it is, or a mask's."""
        latest = self.kept[-1] if self.kept else None
        if latest is None or not latest.is_lost or not latest.is_as_it_was:
            return None
        with contextlib.suppress(Exception):  # the run has ended, and that well
            birth = run_again(latest, backward=False).birth
            return None if birth is not None and birth.is_mask else birth
        return None
