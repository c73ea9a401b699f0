"""Mistakes of the script that amp has warned of, in a few words: they may lie behind what is lost."""

from __future__ import annotations

from ampcompat.tools.core import has_warned_of

_MISTAKES = {
    "unknown optimizer": "steps of an optimizer that amp.initialize was not given",
    "half gradients edited": "gradients of the model's half weights that the script wrote",
    "no block": "steps with gradients of a backward() outside of scale_loss",
    "unscaled loss in a block": "a block whose gradients do not come from the scaled loss",
}


def warned() -> list[str]:
    """The mistakes that amp has warned of in this run."""
    return [words for mistake, words in _MISTAKES.items() if has_warned_of(mistake)]
