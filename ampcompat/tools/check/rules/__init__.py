"""Mistakes in mixed precision that a run does not refuse, or that one device cannot show.

A rule is one function that finds its places in a file, and a condition on the level. Each has a true example and a
look-alike in ``tests/tools/check/rule_examples.py``.
"""

from ampcompat.tools.check.rules.after_block import backward_after_block, clip_of_model_params, edit_of_model_gradients
from ampcompat.tools.check.rules.fills import overflowing_fill
from ampcompat.tools.check.rules.in_block import clip_of_scaled_gradients, step_in_block
from ampcompat.tools.check.rules.rule import Rule, Suspect, has_masters, is_float16, is_scaled, unscales_or_copies
from ampcompat.tools.check.rules.unscaled import unscaled_backward
from ampcompat.tools.check.rules.wrapped import wrapped_before_initialize

__all__ = ["RULES", "Rule", "Suspect"]

RULES = (
    Rule(clip_of_model_params, has_masters),
    Rule(edit_of_model_gradients, has_masters),
    Rule(clip_of_scaled_gradients, is_scaled),
    Rule(step_in_block, unscales_or_copies),
    Rule(backward_after_block, unscales_or_copies),
    Rule(unscaled_backward, unscales_or_copies),
    Rule(wrapped_before_initialize),
    Rule(overflowing_fill, is_float16),
)
