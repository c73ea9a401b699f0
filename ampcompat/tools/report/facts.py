"""The receipt worked out: what the table, the JSON and the page all show."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from ampcompat._state import state
from ampcompat.amp.session import Session
from ampcompat.tools.devices import slow_halves
from ampcompat.tools.dtypes import dtype_name, is_half
from ampcompat.tools.report.history import History, peak_bytes
from ampcompat.tools.report.models import Models
from ampcompat.tools.report.schema import (
    Cast,
    Counts,
    Facts,
    Held,
    Memory,
    ModuleFlops,
    OddProduct,
    Own,
    Process,
    ProcessRow,
    Provenance,
    Reason,
    Setting,
    WideProduct,
)
from ampcompat.tools.report.trace import OpTrace, odd_dimensions

#: Below this share of the FLOPs in half, the headline says float32.
MOSTLY = 0.5
#: Modules named with each reason.
SHOWN = 3

P = TypeVar("P", WideProduct, OddProduct)


def collect(
    trace: OpTrace, history: History, models: Models, traced_steps: int, whole_steps: bool, process: Process
) -> Own:
    """Return what one process counted. Reads the device."""
    latest = state.session
    points = history.read()
    return Own(
        setting=_setting(latest),
        traced_steps=traced_steps,
        ops=_by_direction(trace.ops),
        flops=_by_direction(trace.flops),
        casts=_casts(trace),
        modules=_modules(trace),
        parameters=models.parameters,
        devices=models.devices,
        memory=_memory(trace, models.held),
        steps=history.steps,
        blocks=history.blocks,
        skipped=sum(point.skipped for point in points),
        history=points,
        would_repay=_wide_products(trace),
        odd_products=_odd_products(trace),
        slow=[] if latest is None else _slow(latest, models.devices),
        whole_steps=whole_steps,
        process=process,
    )


def _casts(trace: OpTrace) -> list[Cast]:
    found = []
    for (source, target), count in trace.casts.most_common():
        found.append(Cast(source=source, target=target, count=count, bytes=trace.cast_bytes[source, target]))
    return found


def _wide_products(trace: OpTrace) -> list[WideProduct]:
    found = []
    for product, flops in trace.products.most_common():
        if not is_half(product.dtype):
            shapes = _shapes(product.shapes)
            found.append(
                WideProduct(product.op, product.module, product.dtype, shapes, reason=product.reason, flops=flops)
            )
    return found


def _odd_products(trace: OpTrace) -> list[OddProduct]:
    found = []
    for product, flops in trace.products.most_common():
        odd = odd_dimensions(product)
        if is_half(product.dtype) and odd:
            found.append(OddProduct(product.op, product.module, _shapes(product.shapes), odd, flops))
    return found


def _memory(trace: OpTrace, held: Held) -> Memory:
    made = sum(trace.results.values()) + trace.cast_results
    in_float32 = sum((2 if is_half(dtype) else 1) * size for dtype, size in trace.results.items())
    return Memory(**vars(held), forward_results=made, forward_results_in_float32=in_float32, peak=peak_bytes())


def merged(facts: list[Own]) -> Own:
    """The facts of several processes as one: counts added up, everything else of the first that was initialized."""
    lead = next((one for one in facts if one.setting.initialized), facts[0])
    modules: dict[str, Counter[str]] = {}
    for one in facts:
        for entry in one.modules:
            modules.setdefault(entry.module, Counter()).update(entry.flops)
    memory = replace(
        lead.memory,
        forward_results=sum(one.memory.forward_results for one in facts),
        forward_results_in_float32=sum(one.memory.forward_results_in_float32 for one in facts),
    )
    counts = {name: sum(getattr(one, name) for one in facts) for name in ("traced_steps", "steps", "blocks", "skipped")}
    return replace(
        lead,
        **counts,
        ops={direction: _added(one.ops[direction] for one in facts) for direction in lead.ops},
        flops={direction: _added(one.flops[direction] for one in facts) for direction in lead.flops},
        casts=_added_casts(itertools.chain.from_iterable(one.casts for one in facts)),
        would_repay=_added_products(itertools.chain.from_iterable(one.would_repay for one in facts)),
        odd_products=_added_products(itertools.chain.from_iterable(one.odd_products for one in facts)),
        modules=_ordered(modules),
        whole_steps=all(one.whole_steps for one in facts),
        memory=memory,
    )


def _added(counts: Iterable[Counts]) -> Counts:
    """Counts by dtype added up, the largest first."""
    return dict(sum(map(Counter, counts), Counter[str]()).most_common())


def _added_casts(rows: Iterable[Cast]) -> list[Cast]:
    """Casts with those between the same dtypes added up, the most frequent first."""
    found: dict[tuple[str, str], Cast] = {}
    for row in rows:
        total = found.setdefault((row.source, row.target), replace(row, count=0, bytes=0))
        total.count += row.count
        total.bytes += row.bytes
    return sorted(found.values(), key=lambda row: -row.count)


def _added_products(rows: Iterable[P]) -> list[P]:
    """Products with those alike added up, the largest first."""
    found: dict[str, P] = {}
    for row in rows:
        none_of_it = replace(row, flops=0)
        found.setdefault(repr(none_of_it), none_of_it).flops += row.flops
    return sorted(found.values(), key=lambda row: -row.flops)


def completed(own: Own, provenance: Provenance, processes: list[ProcessRow], of_processes: list[str]) -> Facts:
    """Add to ``own`` what is known of the run, what follows from its counts, and the sentences."""
    facts = Facts(
        **vars(provenance),
        **vars(own),
        processes=processes,
        of_processes=of_processes,
        half_flops_share=half_share(own),
        why_float32=why_float32(own),
        sentences=[],
    )
    facts.sentences = sentences(facts)
    return facts


def why_float32(facts: Own) -> list[Reason]:
    """Why forward products were not half: each reason with its share of the forward FLOPs and its modules."""
    if not facts.setting.half:
        return []
    total = sum(facts.flops["forward"].values()) + sum(facts.flops["no grad"].values())
    found: dict[str, Reason] = {}
    for row in facts.would_repay:
        entry = found.setdefault(row.reason, Reason(row.reason, share=0.0, modules=[]))
        entry.share += row.flops / max(total, 1)
        if row.module not in entry.modules:
            entry.modules.append(row.module)
    return sorted(found.values(), key=lambda entry: -entry.share)


def sentences(facts: Facts) -> list[str]:
    """Sum up in sentences; the first says whether half precision is on, or that the script crashed."""
    share = facts.half_flops_share
    half = facts.setting.half
    found = [facts.ending] if facts.ending else []
    found.append(_headline(facts, share))
    if share is not None and share < MOSTLY and facts.why_float32:
        found.append("In float32, of the forward: " + "; ".join(map(_why, facts.why_float32)) + ".")
    found += facts.slow
    if facts.steps:
        last = facts.history[-1].scales if facts.history else []
        ended = f"; the loss scale ended at {', '.join(f'{scale:g}' for scale in last)}" if last else ""
        found.append(f"{facts.skipped} of {facts.steps} optimizer steps were skipped for overflow{ended}.")
    if facts.steps and not facts.blocks and half == "float16":
        found.append("No scale_loss block was entered: losses were not scaled, so small gradients vanished.")
    if facts.odd_products:
        found.append(
            f"{len(facts.odd_products)} half products have dimensions that are no multiple of 8: GPUs pad them, or"
            " leave the tensor cores idle."
        )
    return [*found, *facts.of_processes]


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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _why(entry: Reason) -> str:
    """As in "60.0 % kept in float32 (head, tail)"."""
    modules = entry.modules
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    return f"{_percent(entry.share)} {entry.reason} ({', '.join(modules[:SHOWN])}{more})"


def _slow(latest: Session, devices: list[str]) -> list[str]:
    if not _setting(latest).half:
        return []
    return [text for text in (slow_halves(one, latest.half_dtype) for one in devices) if text]


def _why_nothing(facts: Facts) -> str:
    setting = facts.setting
    if not setting.initialized:
        if facts.children_counted:
            return "amp.initialize was not called, neither in the script nor in a process that it started."
        return "amp.initialize was not called in this process; what it started is in receipts of `ampcompat run` only."
    if not setting.enabled:
        return "amp.initialize was called with enabled=False."
    if setting.opt_level == "O0":
        return "opt_level O0 is float32 throughout."
    if not any(facts.ops.values()):
        return "no op was traced; a compiled model's are not seen."
    return "what runs is not what amp.initialize was given: pass it the model that is called, and leave its casts on."


def _setting(latest: Session | None) -> Setting:
    if latest is None:
        return Setting(initialized=False, enabled=False, opt_level=None, half="")
    half = latest.enabled and (latest.policy.half_dtype or latest.policy.casts.enabled)
    name = dtype_name(latest.half_dtype) if half else ""
    return Setting(initialized=True, enabled=latest.enabled, opt_level=latest.policy.opt_level, half=name)


def _by_direction(counts: Counter[tuple[str, str]]) -> dict[str, Counts]:
    found: dict[str, Counts] = {"forward": {}, "backward": {}, "no grad": {}}
    for (direction, dtype), count in counts.most_common():
        found[direction][dtype] = count
    return found


def half_share(facts: Own) -> float | None:
    """Share of the FLOPs in half; None where there are none."""
    flops = _added(facts.flops.values())
    total = sum(flops.values())
    return sum(count for dtype, count in flops.items() if is_half(dtype)) / total if total else None


def _modules(trace: OpTrace) -> list[ModuleFlops]:
    by_module: dict[str, Counter[str]] = {}
    for (module, dtype), flops in trace.module_flops.items():
        by_module.setdefault(module, Counter())[dtype] += flops
    return _ordered(by_module)


def _ordered(modules: dict[str, Counter[str]]) -> list[ModuleFlops]:
    ordered = sorted(modules.items(), key=lambda item: -sum(item[1].values()))
    return [ModuleFlops(module, dict(flops)) for module, flops in ordered]


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " · ".join("x".join(map(str, shape)) for shape in shapes[:2])
