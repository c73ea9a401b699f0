"""Gradients that are zero in float16 because the loss scale is too low for them: nothing overflows, nothing trains."""

from __future__ import annotations

from typing import NamedTuple

from ampcompat.tools.core import Optimizer
from ampcompat.tools.explain.weights import gradients_of

#: Below it, the largest gradient times the loss scale leaves next to nothing above float16's least number, 2 ** -24.
SMALL = 2.0**-12
#: The least share of zeros that is told of.
LEAST_SHARE = 0.1


class Underflow(NamedTuple):
    """A step whose gradients were too small for float16."""

    step: int
    share: float  # of its gradients that were 0
    scale: float
    since: int  # the step from which on the scale was that low

    def __str__(self) -> str:
        since = "from the first step on" if self.since == 1 else f"since step {self.since}"
        return (
            f"{100 * self.share:.0f} % of the gradients of step {self.step} were 0 in float16: the loss scale was"
            f" {self.scale:g} {since}, too low for them (a new dynamic one begins at 65536)"
        )


def underflow(optimizer: Optimizer, step: int, largest: float, scale: float, since: int) -> Underflow | None:
    """What became of gradients up to ``largest`` in a step; None where they were not too small. Reads the device.

    Gradients that are all zero show nothing at a usual scale: their loss may not depend on the weights.
    """
    is_too_small = largest * scale < SMALL and (largest > 0 or scale <= 1)
    if not is_too_small:
        return None
    grads = gradients_of(optimizer)
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    share = zeros / max(sum(grad.numel() for grad in grads), 1)
    return Underflow(step, share, scale, since) if share >= LEAST_SHARE else None
