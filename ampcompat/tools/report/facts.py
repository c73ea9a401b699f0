"""The precision report as data: what the text, the JSON file and the page all show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.recording.ops import Product, Tally
from ampcompat.tools.recording.steps import Step

#: Multiplications of these dimensions run on tensor cores without padding.
MULTIPLE = 8
#: Ops or FLOPs by dtype.
Counts = dict[str, int]


@dataclass
class Setting:
    """Tell what the latest ``initialize`` was asked for; ``half`` is "" where nothing is half."""

    initialized: bool = False
    enabled: bool = False
    opt_level: str | None = None
    half: str = ""


@dataclass
class Cast:
    """Count the casts from one dtype to another, and the bytes that they read."""

    source: str
    target: str
    count: int
    bytes: int


@dataclass
class ModuleFlops:
    """Count the FLOPs of one module's forward."""

    module: str
    flops: Counts


@dataclass
class Parameters:
    """Count the parameters of one module and dtype."""

    module: str
    type: str
    dtype: str
    count: int


@dataclass
class Memory:
    """Count bytes: of what the models hold, of what the forwards made, and the most that the accelerator allocated."""

    weights: int = 0
    weights_in_float32: int = 0
    masters: int = 0
    forward_results: int = 0
    forward_results_in_float32: int = 0
    peak: int | None = None


@dataclass
class WideProduct:
    """Describe a forward product that was not half, and why."""

    op: str
    module: str
    dtype: str
    shapes: str
    reason: str
    flops: int


@dataclass
class OddProduct:
    """Describe a half product, and its dimensions that are not multiples of 8."""

    op: str
    module: str
    shapes: str
    odd: list[int]
    flops: int


@dataclass
class Reason:
    """Tell why forward products were not half, with their share of the forward FLOPs, and their modules."""

    reason: str
    share: float
    modules: list[str]


@dataclass
class Facts:
    """Hold the whole report; ops and FLOPs by direction of the pass.

    Attributes:
        script, arguments: What was run.
        date, seconds: When, and for how long so far.
        versions: Of what ran it.
        rank, world: Of this process, and how many there are.
        error: What ended the script, in one line; None where nothing did, or it ended well.
        traced_steps: Optimizer steps whose ops were counted.
        whole_steps: Whether these were all that was asked for, so that counts can be divided by them.
        steps, skipped: All optimizer steps, and those skipped for an overflow.
        blocks: ``scale_loss`` blocks.
        history: Steps with their loss scales; of a long run every second one, and so on, and each that was skipped.
        devices: Types of the devices that hold initialized models.
        slow: Sentences on devices without fast half arithmetic.
        would_repay: Forward products that were not half, largest first.
        half_flops_share: Share of the FLOPs in half; None where there are none.
        why_float32: The reasons of these products.
        sentences: The whole report in words.
    """

    script: str = ""
    arguments: list[str] = field(default_factory=list)
    date: str = ""
    seconds: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    rank: int = 0
    world: int = 1
    error: str | None = None
    setting: Setting = field(default_factory=Setting)
    traced_steps: int = 0
    whole_steps: bool = False
    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    history: list[Step] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    slow: list[str] = field(default_factory=list)
    ops: dict[str, Counts] = field(default_factory=dict)
    flops: dict[str, Counts] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)
    modules: list[ModuleFlops] = field(default_factory=list)
    would_repay: list[WideProduct] = field(default_factory=list)
    odd_products: list[OddProduct] = field(default_factory=list)
    half_flops_share: float | None = None
    why_float32: list[Reason] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def add_counts(facts: Facts, tally: Tally) -> None:
    """Work out what the ops in ``tally`` say."""
    facts.ops = _by_direction(tally.ops)
    facts.flops = _by_direction(tally.flops)
    facts.casts = _casts(tally)
    facts.modules = _modules(tally)
    facts.would_repay = _wide_products(tally)
    facts.odd_products = _odd_products(tally)
    facts.half_flops_share = _half_of_all_flops(tally)
    if facts.setting.half:
        facts.why_float32 = _why_float32(facts.would_repay, facts.flops)
    widened = sum((2 if is_half(dtype) else 1) * size for dtype, size in tally.results.items())
    facts.memory.forward_results = sum(tally.results.values()) + sum(tally.cast_results.values())
    facts.memory.forward_results_in_float32 = widened


def half_share(flops: Mapping[str, int]) -> float:
    """Share of ``flops`` (by dtype) in half."""
    return sum(count for dtype, count in flops.items() if is_half(dtype)) / max(sum(flops.values()), 1)


def _half_of_all_flops(tally: Tally) -> float | None:
    flops: Counter[str] = Counter()
    for (_, dtype), count in tally.flops.items():
        flops[dtype] += count
    return half_share(flops) if sum(flops.values()) else None


def _by_direction(counts: Counter[tuple[str, str]]) -> dict[str, Counts]:
    found: dict[str, Counts] = {"forward": {}, "backward": {}, "no grad": {}}
    for (direction, dtype), count in counts.most_common():
        found[direction][dtype] = count
    return found


def _casts(tally: Tally) -> list[Cast]:
    found = []
    for (source, target), count in tally.casts.most_common():
        found.append(Cast(source, target, count, tally.cast_bytes[source, target]))
    return found


def _modules(tally: Tally) -> list[ModuleFlops]:
    """The FLOPs of each module, that of most first."""
    by_module: dict[str, Counter[str]] = {}
    for product, flops in tally.products.items():
        by_module.setdefault(product.module, Counter())[product.dtype] += flops
    ordered = sorted(by_module.items(), key=lambda item: -sum(item[1].values()))
    return [ModuleFlops(module, dict(flops)) for module, flops in ordered]


def _wide_products(tally: Tally) -> list[WideProduct]:
    found = []
    for one, flops in tally.products.most_common():
        if not is_half(one.dtype):
            found.append(WideProduct(one.op, one.module, one.dtype, _shapes(one), one.reason, flops))
    return found


def _odd_products(tally: Tally) -> list[OddProduct]:
    found = []
    for product, flops in tally.products.most_common():
        odd = odd_dimensions(product)
        if is_half(product.dtype) and odd:
            found.append(OddProduct(product.op, product.module, _shapes(product), odd, flops))
    return found


def odd_dimensions(product: Product) -> list[int]:
    """Dimensions of a half product that are not multiples of 8: those of the matrices, or the channels."""
    if "conv" in product.op:
        found = {size for shape in product.shapes[1:2] for size in shape[:2]}
    else:
        found = {size for shape in product.shapes for size in shape[-2:]}
    return sorted(size for size in found if size % MULTIPLE)


def _shapes(product: Product) -> str:
    return " · ".join("x".join(map(str, shape)) for shape in product.shapes)


def _why_float32(products: list[WideProduct], flops: dict[str, Counts]) -> list[Reason]:
    """Why forward products were not half: each reason with its share of the forward FLOPs and its modules."""
    total = sum(flops["forward"].values()) + sum(flops["no grad"].values())
    found: dict[str, Reason] = {}
    for row in products:
        entry = found.setdefault(row.reason, Reason(row.reason, share=0.0, modules=[]))
        entry.share += row.flops / max(total, 1)
        if row.module not in entry.modules:
            entry.modules.append(row.module)
    return sorted(found.values(), key=lambda entry: -entry.share)
