"""Habits that mixed precision punishes. Each trap is one function ``(source, repository) -> findings``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampcompat.tools.check.findings import Finding
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.traps import loop, numeric, setup
from ampcompat.tools.check.traps.repository import Facts, Repository

Trap = Callable[[Source, Repository], Iterator[Finding]]

TRAPS: tuple[Trap, ...] = (
    setup.misspelt_level,
    setup.level_as_enabled,
    setup.adam_eps_in_half,
    setup.half_by_hand,
    setup.wrapped_before_initialize,
    setup.deepcopy_of_optimizer,
    loop.clip_of_model_params,
    loop.clip_of_scaled_gradients,
    loop.edit_of_model_gradients,
    loop.unscaled_backward,
    loop.backward_of_wrong_loss,
    numeric.banned_cross_entropy,
    numeric.vanishing_constant,
    numeric.overflowing_fill,
)

__all__ = ["TRAPS", "Facts", "Repository", "Trap"]
