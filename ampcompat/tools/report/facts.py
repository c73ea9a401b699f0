"""The precision report as data, and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.words import counted, were

#: Places of float32 products that are named in the sentences; the JSON has all.
PLACES = 5


@dataclass
class OpCount:
    """An op: how often it ran, in which pass, and the dtype of its result."""

    op: str
    direction: str
    dtype: str
    count: int
    flops: int


@dataclass
class Float32Product:
    """A matrix product, convolution or attention in float32: the op, the line of the script, how often it ran there."""

    op: str
    place: str
    count: int
    flops: int


@dataclass
class Facts:
    """Hold the whole report.

    Attributes:
        rank, world: Of this process, and how many there are.
        error: What ended the script, in one line; None where nothing did, or it ended well.
        initialized, enabled: Whether ``initialize`` was called, and asked for amp.
        opt_level, half: What the latest session was asked for; ``half`` is "" where nothing is half.
        traced_steps: Optimizer steps whose ops were counted.
        steps, skipped: All optimizer steps, and those skipped for an overflow.
        blocks: ``scale_loss`` blocks.
        loss_scales: The scale of each loss after the last step, by ``loss_id``.
        ops: What ran in the traced steps, what takes most FLOPs first, then what ran most often.
        float32_products: Where products of the forward ran in float32, what takes most FLOPs first.
        slow: Sentences on devices without fast half arithmetic.
        half_flops_share: Share of the FLOPs in half; None where there are none.
        sentences: The report in words.
    """

    rank: int = 0
    world: int = 1
    error: str | None = None
    initialized: bool = False
    enabled: bool = False
    opt_level: str | None = None
    half: str = ""
    traced_steps: int = 0
    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    loss_scales: dict[int, float] = field(default_factory=dict)
    ops: list[OpCount] = field(default_factory=list)
    float32_products: list[Float32Product] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    half_flops_share: float | None = None
    sentences: list[str] = field(default_factory=list)


def half_share(ops: list[OpCount]) -> float | None:
    """Share of the FLOPs of ``ops`` in half; None where there are none."""
    total = sum(one.flops for one in ops)
    return sum(one.flops for one in ops if is_half(one.dtype)) / total if total else None


def sentences(facts: Facts) -> list[str]:
    """Sum up in sentences; the first says how much ran in half precision, or what ended the script."""
    found = []
    if facts.error is not None:
        found.append(f"The script ended after {facts.steps} optimizer steps: {facts.error}")
    found.append(_headline(facts))
    if facts.half and facts.float32_products:
        found.append(_where_float32(facts.float32_products))
    found += facts.slow
    if facts.steps:
        found.append(_skips(facts))
    if facts.steps and not facts.blocks and facts.half == "float16":
        found.append("No scale_loss block was entered: no loss was scaled.")
    if facts.world > 1:
        found.append(f"This report is of rank {facts.rank}, one of {facts.world}.")
    return found


def _where_float32(products: Sequence[Float32Product]) -> str:
    """The lines whose products ran in float32."""
    named = [f"{one.op} at {one.place}" for one in products[:PLACES]]
    more = len(products) - PLACES
    if more > 0:
        named.append(f"and at {counted(more, 'more place')}")
    return f"Products in float32: {'; '.join(named)}."


def _skips(facts: Facts) -> str:
    """How many steps were skipped, and where the loss scales ended."""
    told = f"{facts.skipped} of {facts.steps} optimizer steps {were(facts.skipped)} skipped for overflow"
    if not facts.loss_scales:
        return f"{told}."
    scales = [_scale_text(facts.loss_scales[loss_id]) for loss_id in sorted(facts.loss_scales)]
    return f"{told}; the loss scale ended at {', '.join(scales)}."


def _scale_text(scale: float) -> str:
    """A loss scale with all of its digits, as in "16777216", unless it is a fraction."""
    return f"{scale:.0f}" if scale == round(scale) else f"{scale:g}"


def _headline(facts: Facts) -> str:
    """How much ran in half precision."""
    if not any(is_half(one.dtype) for one in facts.ops):
        return f"Nothing ran in half precision: {_why_nothing(facts)}"
    if facts.half_flops_share is None:
        return f"Ops ran in {facts.half or 'half'}, but no matrix product, convolution or attention among them."
    return f"{100 * facts.half_flops_share:.1f} % of the FLOPs ran in {facts.half or 'half'}."


def _why_nothing(facts: Facts) -> str:
    if not facts.initialized:
        return (
            "amp.initialize was not called in this process. With `ampcompat run --report=FILE`, processes that it"
            " starts write reports of their own."
        )
    if not facts.enabled:
        return "amp.initialize was called with enabled=False."
    if not facts.half:
        return f"opt_level {facts.opt_level} is float32 throughout."
    if not facts.ops:
        return "no op was traced."
    return "see that amp.initialize was given the model that is called, and that its casts are on."
