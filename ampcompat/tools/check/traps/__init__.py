"""Mistakes that go wrong in mixed precision. Each trap is one function ``(source) -> mistakes``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampcompat.tools.check.mistakes import Mistake
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.traps import after_block, arguments, cross_entropy, fills, in_block, without_block

Trap = Callable[[Source], Iterator[Mistake]]

TRAPS: tuple[Trap, ...] = (
    arguments.misspelt_level,
    arguments.level_as_enabled,
    arguments.wrapped_before_initialize,
    arguments.loss_id_out_of_range,
    arguments.whole_checkpoint,
    after_block.clip_of_model_params,
    after_block.edit_of_model_gradients,
    in_block.clip_of_scaled_gradients,
    in_block.backward_of_wrong_loss,
    after_block.backward_after_block,
    in_block.step_in_block,
    without_block.unscaled_backward,
    cross_entropy.banned_cross_entropy,
    fills.overflowing_fill,
)

__all__ = ["TRAPS", "Trap"]
