"""Gradients that are zero, by a low loss scale, the script or its loss: nothing overflows, nothing trains."""

from __future__ import annotations

from typing import NamedTuple

from ampcompat.tools.core import Optimizer
from ampcompat.tools.explain.lost import WINDOW
from ampcompat.tools.explain.weights import gradients_of

#: Below it, the largest gradient times the loss scale leaves next to nothing above float16's least number, 2 ** -24.
SMALL = 2.0**-12
#: Few gradients need a higher loss scale.
USUAL_SCALE = 2.0**15
#: The least share of zeros that is told of.
LEAST_SHARE = 0.1


class Underflow(NamedTuple):
    """A step whose gradients were too small for float16, or made 0 by the script, or 0 for many steps."""

    step: int
    share: float  # of its gradients that were 0
    scale: float
    since: int  # the step from which on the scale was that low
    before: float = 0.0  # the largest when their block ended, if the script has made them 0 since
    zeros: int = 0  # how many steps in a row had gradients of 0 alone, if these are many

    def __str__(self) -> str:
        if self.before:
            return (
                f"the gradients of step {self.step} were all 0, though they reached {self.before:.3g} when their block"
                " ended: look at what scales them after it, such as a clip by a norm whose squares are inf in float16"
            )
        if self.zeros:
            too_low = "" if self.scale >= USUAL_SCALE else f"the loss scale, {self.scale:g}, is too low for them, or "
            return (
                f"the gradients of the last {self.zeros} steps were all 0: {too_low}the loss does not depend on the"
                " weights there, as where a sum that is inf in float16 divides it"
            )
        since = "from the first step on" if self.since == 1 else f"since step {self.since}"
        return (
            f"{100 * self.share:.0f} % of the gradients of step {self.step} were 0 in float16: the loss scale was"
            f" {self.scale:g} {since}, too low for them (a new dynamic one begins at 65536)"
        )


def underflow(
    optimizer: Optimizer, step: int, largest: float, scale: float, since: int, before: float, steps_of_zeros: int
) -> Underflow | None:
    """What became of gradients up to ``largest`` in a step; None where they were not too small. Reads the device.

    Gradients that are all zero show nothing at a usual scale, unless many steps in a row have these: their loss may not
    depend on the weights. Those that were not 0 ``before``, when their block ended, were made 0 since.
    """
    if largest == 0 and before:
        return Underflow(step, 1.0, scale, since, before)
    is_too_small = largest * scale < SMALL and (largest > 0 or scale <= 1)
    if not is_too_small:
        return Underflow(step, 1.0, scale, since, zeros=steps_of_zeros) if steps_of_zeros >= WINDOW else None
    grads = gradients_of(optimizer)
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    share = zeros / max(sum(grad.numel() for grad in grads), 1)
    return Underflow(step, share, scale, since) if share >= LEAST_SHARE else None
