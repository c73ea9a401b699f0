"""Mistakes that go wrong in mixed precision. Each trap is one function ``(source) -> mistakes``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.traps import arguments, loop, numeric

Trap = Callable[[Source], Iterator[Mistake]]

TRAPS: tuple[Trap, ...] = (
    arguments.misspelt_level,
    arguments.level_as_enabled,
    arguments.loss_id_out_of_range,
    arguments.whole_checkpoint,
    loop.clip_of_model_params,
    loop.edit_of_model_gradients,
    loop.clip_of_scaled_gradients,
    loop.backward_of_wrong_loss,
    loop.backward_after_block,
    loop.step_in_block,
    loop.unscaled_backward,
    numeric.banned_cross_entropy,
    numeric.overflowing_fill,
)

#: Traps that the check had once, and what reports them.
FORMER_TRAPS = {
    "half_by_hand": "amp.initialize refuses such a model",
    "wrapped_before_initialize": "amp.initialize refuses such a model",
    "vanishing_constant": "ampcompat run --explain names the line",
    "adam_eps_in_half": "ampcompat run --explain names the weights",
    "deepcopy_of_optimizer": "plain torch steps the copy's own parameters too",
}

__all__ = ["FORMER_TRAPS", "TRAPS", "Trap"]
