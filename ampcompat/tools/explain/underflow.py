"""Gradients that are zero in float16 because the loss scale is too low for them: nothing overflows, nothing trains."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ampcompat.tools.core import Optimizer, latest_call
from ampcompat.tools.explain.written import params_of

#: Below it, the largest gradient times the loss scale leaves next to nothing above float16's least number, 2 ** -24.
SMALL = 2.0**-12
#: The least share of zeros that is told of.
LEAST_SHARE = 0.1


@dataclass
class Underflow:
    """A step whose gradients were too small for float16.

    Attributes:
        step: Its number.
        share: How many of its gradients were 0.
        scale: The loss scale.
        since: The step from which on the scale was that low.
    """

    step: int
    share: float
    scale: float
    since: int

    def __str__(self) -> str:
        since = "from the first step on" if self.since == 1 else f"since step {self.since}"
        return (
            f"{100 * self.share:.0f} % of the gradients of step {self.step} were 0 in float16: the loss scale was"
            f" {self.scale:g} {since}, too low for them (a new dynamic one begins at 65536)"
        )

    def as_dict(self) -> dict[str, float]:
        """The same for a line of JSON."""
        return asdict(self)


def can_vanish() -> bool:
    """Whether gradients are computed in float16."""
    latest = latest_call()
    return latest is not None and latest.half_dtype == torch.float16


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The dense gradients that ``optimizer`` has stepped with, unscaled."""
    grads = [param.grad for _, param in params_of(optimizer)]
    return [grad.detach() for grad in grads if grad is not None and not grad.is_sparse and grad.numel()]


def is_too_small(largest: float, scale: float) -> bool:
    """Whether gradients up to ``largest``, times ``scale``, are too small for float16.

    Gradients that are all zero show nothing at a usual scale: their loss may not depend on the weights.
    """
    return largest * scale < SMALL and (largest > 0 or scale < 1)


def share_of_zeros(grads: list[torch.Tensor]) -> float:
    """How many of ``grads`` are zero. Reads the device."""
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    return zeros / max(sum(grad.numel() for grad in grads), 1)
