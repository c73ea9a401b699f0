"""The receipt as plain data: what the table, the JSON and the page all show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ampcompat._state import state
from ampcompat.report.devices import slow_halves
from ampcompat.report.history import History, peak_bytes
from ampcompat.report.models import Models
from ampcompat.report.trace import OpTrace, dtype_name, is_half, odd_dimensions

#: Ops listed that would repay half precision, and modules listed.
TOP = 10


def collect(trace: OpTrace, history: History, models: Models, traced_steps: int) -> dict[str, Any]:
    """Everything a receipt says, as JSON-able data. Reads the device."""
    latest = state.session
    points = history.read()
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "setting": _setting(latest),
        "traced_steps": traced_steps,
        "ops": _by_direction(trace.ops),
        "flops": _by_direction(trace.flops),
        "half_flops_share": _share(trace),
        "casts": [
            {"from": a, "to": b, "count": count, "bytes": trace.cast_bytes[a, b]}
            for (a, b), count in trace.casts.most_common()
        ],
        "modules": _modules(trace),
        "parameters": models.parameters,
        "devices": models.devices,
        "memory": {**models.memory, **_results(trace), "peak": peak_bytes()},
        "steps": history.steps,
        "blocks": history.blocks,
        "skipped": sum(point["skipped"] for point in points),
        "history": points,
        "would_repay": [
            {"op": p.op, "module": p.module, "dtype": p.dtype, "shapes": _shapes(p.shapes), "flops": flops}
            for p, flops in trace.products.most_common()
            if not is_half(p.dtype)
        ][:TOP],
        "odd_products": [
            {"op": p.op, "module": p.module, "shapes": _shapes(p.shapes), "odd": odd_dimensions(p), "flops": flops}
            for p, flops in trace.products.most_common()
            if is_half(p.dtype) and odd_dimensions(p)
        ],
    }
    facts["sentences"] = sentences(facts, latest)
    return facts


def sentences(facts: dict[str, Any], latest: Any) -> list[str]:
    """What matters, in words; the first says whether half precision is on."""
    share, found = facts["half_flops_share"], []
    half = facts["setting"]["half"]
    if not any(is_half(dtype) for counts in facts["ops"].values() for dtype in counts):
        found.append(f"Nothing ran in half precision: {_why_nothing(facts)}")
    elif share is None:
        found.append(f"Ops ran in {half}, but no matrix product, convolution or attention among them.")
    else:
        found.append(f"Half precision is on: {100 * share:.1f} % of the FLOPs ran in {half or 'half'}.")
    if latest is not None and half:
        for device_type in facts["devices"]:
            found.extend(filter(None, [slow_halves(device_type, latest.half)]))
    if facts["steps"]:
        last = facts["history"][-1]["scales"] if facts["history"] else []
        ended = f"; the loss scale ended at {', '.join(f'{scale:g}' for scale in last)}" if last else ""
        found.append(f"{facts['skipped']} of {facts['steps']} optimizer steps were skipped for overflow{ended}.")
    if facts["steps"] and not facts["blocks"] and half == "float16":
        found.append("No scale_loss block was entered: losses were not scaled, so small gradients vanished.")
    if facts["odd_products"]:
        found.append(
            f"{len(facts['odd_products'])} half products have dimensions that are no multiple of 8: GPUs pad them, or"
            " leave the tensor cores idle."
        )
    return found


def _why_nothing(facts: dict[str, Any]) -> str:
    setting = facts["setting"]
    if not setting["initialized"]:
        return "amp.initialize was not called in this process; what a script starts in others is not in its receipt."
    if not setting["enabled"]:
        return "amp.initialize was called with enabled=False."
    if setting["opt_level"] == "O0":
        return "opt_level O0 is float32 throughout."
    if not any(facts["ops"].values()):
        return "no op was traced; a compiled model's are not seen."
    return "what runs is not what amp.initialize was given: pass it the model that is called, and leave its casts on."


def _setting(latest: Any) -> dict[str, Any]:
    half = latest is not None and latest.enabled and (latest.policy.half or latest.policy.casts.enabled)
    return {
        "initialized": latest is not None,
        "enabled": latest is not None and latest.enabled,
        "opt_level": None if latest is None else latest.policy.opt_level,
        "half": dtype_name(latest.half) if half else "",
    }


def _by_direction(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"forward": {}, "backward": {}, "no grad": {}}
    for (direction, dtype), count in counts.most_common():
        found[direction][dtype] = count
    return found


def _share(trace: OpTrace) -> float | None:
    total = sum(trace.flops.values())
    return sum(flops for (_, dtype), flops in trace.flops.items() if is_half(dtype)) / total if total else None


def _modules(trace: OpTrace) -> list[dict[str, Any]]:
    by_module: dict[str, Counter[str]] = {}
    for (module, dtype), flops in trace.module_flops.items():
        by_module.setdefault(module, Counter())[dtype] += flops
    ordered = sorted(by_module.items(), key=lambda item: -sum(item[1].values()))
    return [{"module": module, "flops": dict(flops)} for module, flops in ordered]


def _results(trace: OpTrace) -> dict[str, int]:
    wide = sum((2 if is_half(dtype) else 1) * size for dtype, size in trace.results.items())
    now = sum(trace.results.values()) + trace.cast_results
    return {"forward_results": now, "forward_results_in_float32": wide}


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " · ".join("x".join(map(str, shape)) for shape in shapes[:2])
