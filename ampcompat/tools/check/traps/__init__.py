"""Mistakes that go wrong in mixed precision. Each trap is one function ``(source, repository) -> findings``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampcompat.tools.check.findings import Finding
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.traps import arguments, loop, numeric
from ampcompat.tools.check.traps.repository import Facts, Repository

Trap = Callable[[Source, Repository], Iterator[Finding]]

TRAPS: tuple[Trap, ...] = (
    arguments.misspelt_level,
    arguments.level_as_enabled,
    loop.clip_of_model_params,
    loop.edit_of_model_gradients,
    loop.clip_of_scaled_gradients,
    loop.backward_of_wrong_loss,
    numeric.banned_cross_entropy,
    numeric.overflowing_fill,
)

#: Traps that the check had once, and what reports them.
FORMER_TRAPS = {
    "half_by_hand": "amp.initialize refuses such a model",
    "wrapped_before_initialize": "amp.initialize refuses such a model",
    "unscaled_backward": "at O2 amp warns at the step",
    "vanishing_constant": "ampcompat run --explain names the line",
    "adam_eps_in_half": "ampcompat run --explain names the weights",
    "deepcopy_of_optimizer": "plain torch steps the copy's own parameters too",
}

__all__ = ["FORMER_TRAPS", "TRAPS", "Facts", "Repository", "Trap"]
