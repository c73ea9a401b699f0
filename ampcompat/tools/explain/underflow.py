"""Gradients that are 0, in numbers: nothing overflows, and nothing trains."""

from __future__ import annotations

from ampcompat.tools.explain.steps import Steps
from ampcompat.tools.explain.weights import gradients_of

#: Below it, the largest gradient times the loss scale leaves next to nothing above float16's least number, 2 ** -24.
SMALL = 2.0**-12
#: So many steps in a row with gradients of 0 alone are told of.
MANY = 20


def underflow(steps: Steps, name: str, scale: float, largest: float) -> str:
    """Tell of gradients that are next to 0 in float16, or were 0 for many steps; "" of any others.

    Args:
        steps: The steps of an optimizer that has just made one.
        name: That step, as in "step 31".
        scale: The loss scale.
        largest: The largest gradient.
    """
    if steps.steps_of_zeros >= MANY:
        return f"{steps.steps_of_zeros} steps, up to {name}, had gradients of 0 alone, at a loss scale of {scale:g}"
    if largest * scale >= SMALL or (largest == 0 and scale > 1):
        return ""
    grads = gradients_of(steps.optimizer)
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    share = 100 * zeros / sum(grad.numel() for grad in grads)
    return (
        f"{share:.0f} % of the gradients of {name} were 0, and the largest {largest:.3g}, at a loss scale of {scale:g}"
    )
