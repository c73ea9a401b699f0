"""The sentences at the head of a precision report."""

from __future__ import annotations

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report.facts import Facts, Reason

#: Below this share of the FLOPs in half, the headline says float32.
MOSTLY = 0.5
#: Modules named with each reason.
SHOWN = 3


def sentences(facts: Facts) -> list[str]:
    """Sum up in sentences; the first says whether half precision is on, or what ended the script."""
    share = facts.half_flops_share
    found = []
    if facts.error is not None:
        found.append(f"The script ended after {facts.steps} optimizer steps: {facts.error}")
    found.append(_headline(facts, share))
    if share is not None and share < MOSTLY and facts.why_float32:
        found.append("In float32, of the forward: " + "; ".join(map(_why, facts.why_float32)) + ".")
    found += facts.slow
    if facts.steps:
        last = {one.loss_id: one.scale for step in facts.history for one in step.scales}
        scales = ", ".join(f"{last[loss_id]:g}" for loss_id in sorted(last))
        were = "was" if facts.skipped == 1 else "were"
        ended = f"; the loss scale ended at {scales}" if scales else ""
        found.append(f"{facts.skipped} of {facts.steps} optimizer steps {were} skipped for overflow{ended}.")
        if facts.skipped > _healthy_skips(facts.steps):
            found.append("Finding the loss scale costs fewer: `ampcompat run --explain` looks for the cause.")
    if facts.steps and not facts.blocks and facts.setting.half == "float16":
        found.append("No scale_loss block was entered: losses were not scaled, so small gradients vanished.")
    if facts.odd_products:
        count = len(facts.odd_products)
        products = "1 half product has" if count == 1 else f"{count} half products have"
        found.append(f"{products} dimensions that are not multiples of 8: GPUs pad them, or leave tensor cores idle.")
    if facts.world > 1:
        found.append(f"This report is of rank {facts.rank}, one of {facts.world}.")
    return found


def _healthy_skips(steps: int) -> float:
    """The most steps that a dynamic loss scale skips in a healthy run: at its start, and when it has grown again."""
    return 10 + steps / 500


def _headline(facts: Facts, share: float | None) -> str:
    """Whether half precision is on."""
    half = facts.setting.half
    if not any(is_half(dtype) for counts in facts.ops.values() for dtype in counts):
        return f"Nothing ran in half precision: {_why_nothing(facts)}"
    if share is None:
        return f"Ops ran in {half}, but no matrix product, convolution or attention among them."
    if share < MOSTLY:
        return f"Mostly float32: {_percent(share)} of the FLOPs ran in {half or 'half'}."
    return f"Half precision is on: {_percent(share)} of the FLOPs ran in {half or 'half'}."


def _why_nothing(facts: Facts) -> str:
    setting = facts.setting
    if not setting.initialized:
        return (
            "amp.initialize was not called in this process. With `ampcompat run --report=FILE`, processes that it"
            " starts write reports of their own."
        )
    if not setting.enabled:
        return "amp.initialize was called with enabled=False."
    if not setting.half:
        return f"opt_level {setting.opt_level} is float32 throughout."
    if not any(facts.ops.values()):
        return "no op was traced; a compiled model's are not seen."
    return "what runs is not what amp.initialize was given: pass it the model that is called, and leave its casts on."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _why(entry: Reason) -> str:
    """As in "60.0 % kept in float32 (head, tail)"."""
    modules = entry.modules
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    return f"{_percent(entry.share)} {entry.reason} ({', '.join(modules[:SHOWN])}{more})"
