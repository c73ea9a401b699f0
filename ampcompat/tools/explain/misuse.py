"""Mistakes of the script that amp has warned of, and that explain lost steps better than the op where they show."""

from __future__ import annotations

from typing import NamedTuple

from ampcompat.tools.core import has_warned_of


class Misuse(NamedTuple):
    """A mistake."""

    cause: str  # what it is, in a few words
    hint: str
    spoils_steps: bool = True  # the steps that it makes may spoil the weights


_EDITED = Misuse(
    "gradients of the model's half parameters that the script wrote, while the optimizer steps with those of masters",
    "clip or scale the gradients of amp.master_params(optimizer), not of model.parameters()",
)
_MISUSES = {
    "unknown optimizer": Misuse(
        "steps of an optimizer that amp.initialize was not given",
        "give amp.initialize each optimizer that steps the model, and scale_loss: it unscales their gradients",
    ),
    "scaled gradients of another block": Misuse(
        "gradients that a scale_loss block of another optimizer has added, which are still multiplied by its scale",
        "give that block both optimizers, `with amp.scale_loss(loss, [optimizer_a, optimizer_b])`, or step before it",
    ),
    "half gradients edited": _EDITED,
    "half gradients assigned": _EDITED,
    "no block": Misuse(
        "steps with gradients of a backward() outside of scale_loss",
        "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`",
        spoils_steps=False,
    ),
}


def spoiling_misuse() -> Misuse | None:
    """The mistake that may have spoiled the weights, if amp has warned of one."""
    found = (misuse for mistake, misuse in _MISUSES.items() if misuse.spoils_steps and has_warned_of(mistake))
    return next(found, None)


def warned() -> list[str]:
    """The mistakes that amp has warned of, in a few words."""
    return list(dict.fromkeys(misuse.cause for mistake, misuse in _MISUSES.items() if has_warned_of(mistake)))
