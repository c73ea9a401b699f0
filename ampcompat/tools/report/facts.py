"""The receipt worked out: what the table, the JSON and the page all show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report.record import Product, Record, Tally
from ampcompat.tools.report.schema import (
    Cast,
    Counts,
    Facts,
    Memory,
    ModuleFlops,
    OddProduct,
    ProcessRow,
    Provenance,
    Reason,
    Seen,
    WideProduct,
)
from ampcompat.tools.report.sentences import sentences

#: Multiplications of these dimensions run on tensor cores without padding.
MULTIPLE = 8


def facts_of(record: Record, provenance: Provenance, processes: list[ProcessRow], remarks: list[str]) -> Facts:
    """Work out the receipt from what was counted.

    Args:
        record: Of all processes together.
        provenance: What was run.
        processes: A row for each, where there are several.
        remarks: Sentences on them.
    """
    tally = record.tally
    flops = _by_direction(tally.flops)
    wide_products = _wide_products(tally)
    seen = {one.name: getattr(record, one.name) for one in fields(Seen)}
    seen["memory"] = _memory(record)
    facts = Facts(
        **vars(provenance),
        **seen,
        ops=_by_direction(tally.ops),
        flops=flops,
        casts=_casts(tally),
        modules=_modules(tally),
        would_repay=wide_products,
        odd_products=_odd_products(tally),
        processes=processes,
        of_processes=remarks,
        half_flops_share=half_of_all_flops(tally),
        why_float32=_why_float32(wide_products, flops) if record.setting.half else [],
    )
    facts.sentences = sentences(facts)
    return facts


def process_row(record: Record) -> ProcessRow:
    """One process of several."""
    return ProcessRow(
        **vars(record.process),
        half_flops_share=half_of_all_flops(record.tally),
        traced_steps=record.traced_steps,
        steps=record.steps,
        skipped=record.skipped,
    )


def half_of_all_flops(tally: Tally) -> float | None:
    """Share of the FLOPs in half; None where there are none."""
    flops: Counter[str] = Counter()
    for (_, dtype), count in tally.flops.items():
        flops[dtype] += count
    return half_share(flops) if sum(flops.values()) else None


def half_share(flops: Mapping[str, int]) -> float:
    """Share of ``flops`` (by dtype) in half."""
    return sum(count for dtype, count in flops.items() if is_half(dtype)) / max(sum(flops.values()), 1)


def _by_direction(counts: Counter[tuple[str, str]]) -> dict[str, Counts]:
    found: dict[str, Counts] = {"forward": {}, "backward": {}, "no grad": {}}
    for (direction, dtype), count in counts.most_common():
        found[direction][dtype] = count
    return found


def _casts(tally: Tally) -> list[Cast]:
    return [
        Cast(source=source, target=target, count=count, bytes=tally.cast_bytes[source, target])
        for (source, target), count in tally.casts.most_common()
    ]


def _modules(tally: Tally) -> list[ModuleFlops]:
    """The FLOPs of each module, that of most first."""
    by_module: dict[str, Counter[str]] = {}
    for product, flops in tally.products.items():
        by_module.setdefault(product.module, Counter())[product.dtype] += flops
    ordered = sorted(by_module.items(), key=lambda item: -sum(item[1].values()))
    return [ModuleFlops(module, dict(flops)) for module, flops in ordered]


def _memory(record: Record) -> Memory:
    results, casts = record.tally.results, record.tally.cast_results
    in_float32 = sum((2 if is_half(dtype) else 1) * size for dtype, size in results.items())
    made = sum(results.values()) + sum(casts.values())
    return replace(record.memory, forward_results=made, forward_results_in_float32=in_float32)


def _wide_products(tally: Tally) -> list[WideProduct]:
    return [
        WideProduct(one.op, one.module, one.dtype, _shapes(one), one.reason, flops)
        for one, flops in tally.products.most_common()
        if not is_half(one.dtype)
    ]


def _odd_products(tally: Tally) -> list[OddProduct]:
    found = []
    for product, flops in tally.products.most_common():
        odd = odd_dimensions(product)
        if is_half(product.dtype) and odd:
            found.append(OddProduct(product.op, product.module, _shapes(product), odd, flops))
    return found


def odd_dimensions(product: Product) -> list[int]:
    """Dimensions of a half product that are no multiple of 8: those of the matrices, or the channels."""
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
