"""The precision report as data, and in sentences: what the text, the JSON file and the page all show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.recording.steps import Step
from ampcompat.tools.words import counted

#: Below this share of the FLOPs in half, the headline says float32.
MOSTLY = 0.5
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
        script, arguments: What was run.
        versions: Of what ran it.
        rank, world: Of this process, and how many there are.
        error: What ended the script, in one line; None where nothing did, or it ended well.
        initialized, enabled: Whether ``initialize`` was called, and asked for amp.
        opt_level, half: What the latest call was asked for; ``half`` is "" where nothing is half.
        traced_steps: Optimizer steps whose ops were counted.
        steps, skipped: All optimizer steps, and those skipped for an overflow.
        blocks: ``scale_loss`` blocks.
        ops: What ran in the traced steps, what takes most FLOPs first, then what ran most often.
        float32_products: Where products of the forward ran in float32, what takes most FLOPs first.
        history: Steps with their loss scales; of a long run every second one, and so on, and each that was skipped.
        slow: Sentences on devices without fast half arithmetic.
        half_flops_share: Share of the FLOPs in half; None where there are none.
        sentences: The whole report in words.
    """

    script: str = ""
    arguments: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
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
    ops: list[OpCount] = field(default_factory=list)
    float32_products: list[Float32Product] = field(default_factory=list)
    history: list[Step] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    half_flops_share: float | None = None
    sentences: list[str] = field(default_factory=list)


def half_share(ops: list[OpCount]) -> float | None:
    """Share of the FLOPs of ``ops`` in half; None where there are none."""
    total = sum(one.flops for one in ops)
    return sum(one.flops for one in ops if is_half(one.dtype)) / total if total else None


def sentences(facts: Facts) -> list[str]:
    """Sum up in sentences; the first says whether half precision is on, or what ended the script."""
    found = []
    if facts.error is not None:
        found.append(f"The script ended after {facts.steps} optimizer steps: {facts.error}")
    found.append(_headline(facts))
    if facts.half and facts.float32_products:
        found.append(_where_float32(facts.float32_products))
    found += facts.slow
    if facts.steps:
        were = "was" if facts.skipped == 1 else "were"
        scale = _loss_scale(facts.history)
        found.append(f"{facts.skipped} of {facts.steps} optimizer steps {were} skipped for overflow{scale}.")
        if facts.skipped > _healthy_skips(facts.steps):
            found.append("Finding the loss scale costs fewer: `ampcompat run --explain` looks for the cause.")
    if facts.steps and not facts.blocks and facts.half == "float16":
        found.append("No scale_loss block was entered: losses were not scaled, so small gradients vanished.")
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


def _loss_scale(history: Sequence[Step]) -> str:
    """What the loss scales were, or ended at; "" without a block."""
    last = {one.loss_id: one.scale for step in history for one in step.scales}
    if not last:
        return ""
    scales = ", ".join(scale_text(last[loss_id]) for loss_id in sorted(last))
    if is_constant(history):
        after = "after the first step " if history[0].skipped else ""  # scales are those after each step
        return f"; {after}the loss scale was {scales} throughout"
    return f"; the loss scale ended at {scales}"


def is_constant(history: Sequence[Step]) -> bool:
    """Whether no loss scale has moved."""
    seen = {(one.loss_id, one.scale) for step in history for one in step.scales}
    return len(seen) == len({loss_id for loss_id, _ in seen})


def scale_text(scale: float) -> str:
    """A loss scale with all of its digits, as in "16777216", unless it is a fraction."""
    return f"{scale:.0f}" if scale == round(scale) else f"{scale:g}"


def _healthy_skips(steps: int) -> float:
    """The most steps that a dynamic loss scale skips in a healthy run: at its start, and when it has grown again."""
    return 10 + steps / 500


def _headline(facts: Facts) -> str:
    """Whether half precision is on."""
    share = facts.half_flops_share
    if not any(is_half(one.dtype) for one in facts.ops):
        return f"Nothing ran in half precision: {_why_nothing(facts)}"
    if share is None:
        return f"Ops ran in {facts.half}, but no matrix product, convolution or attention among them."
    head = "Mostly float32" if share < MOSTLY else "Half precision is on"
    return f"{head}: {100 * share:.1f} % of the FLOPs ran in {facts.half or 'half'}."


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
        return "no op was traced; a compiled model's are not seen."
    return "what runs is not what amp.initialize was given: pass it the model that is called, and leave its casts on."
