"""Gradients that are 0, as numbers: nothing overflows, and nothing trains."""

from __future__ import annotations

from dataclasses import dataclass

from ampcompat.tools.core import Optimizer
from ampcompat.tools.explain.weights import gradients_of

#: Below it, the largest gradient times the loss scale leaves next to nothing above float16's least number, 2 ** -24.
SMALL = 2.0**-12
#: So many steps in a row with gradients of 0 alone are told of.
MANY = 20


@dataclass(frozen=True)
class Underflow:
    """The gradients of a step that was made, in numbers.

    Attributes:
        step: The step.
        scale: The loss scale.
        largest: The largest gradient.
        zeros: How many gradients were 0.
        elements: Of how many.
        before: The largest when their block ended, if all were 0 at the step; otherwise 0.
        steps: How many steps in a row had gradients of 0 alone.
    """

    step: int
    scale: float
    largest: float
    zeros: int
    elements: int
    before: float
    steps: int

    def __str__(self) -> str:
        if self.before:
            return (
                f"the gradients of step {self.step} were all 0; when their block ended, the largest was"
                f" {self.before:.3g}"
            )
        scale = f"at a loss scale of {self.scale:g}"
        if self.steps >= MANY:
            return f"the gradients of the last {self.steps} steps were all 0, {scale}"
        share = 100 * self.zeros / self.elements
        return f"{share:.0f} % of the gradients of step {self.step} were 0, and the largest {self.largest:.3g}, {scale}"


def underflow(
    optimizer: Optimizer, step: int, scale: float, largest: float, before: float, steps: int
) -> Underflow | None:
    """The gradients of ``optimizer`` in numbers, if they are next to 0 in float16, or were 0 for many steps.

    The arguments are those of :class:`Underflow`. Reads the device where the gradients are small.
    """
    is_small = 0 < largest * scale < SMALL
    are_zero = largest == 0 and (before > 0 or steps >= MANY or scale <= 1)
    if not is_small and not are_zero:
        return None
    grads = gradients_of(optimizer)
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    elements = sum(grad.numel() for grad in grads)
    return Underflow(step, scale, largest, zeros, elements, before, steps) if zeros else None
