"""The receipt as plain data: what the table, the JSON and the page all show."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ampcompat._state import state
from ampcompat.report.devices import slow_halves
from ampcompat.report.history import History, peak_bytes
from ampcompat.report.models import Models
from ampcompat.report.trace import OpTrace, dtype_name, is_half, odd_dimensions

#: Below this share of the FLOPs in half, the headline says float32.
MOSTLY = 0.5
#: Modules named with each reason.
SHOWN = 3


def collect(trace: OpTrace, history: History, models: Models, traced_steps: int) -> dict[str, Any]:
    """Return what one process counted, as JSON-able data that :func:`merged` adds up. Reads the device."""
    latest = state.session
    points = history.read()
    return {
        "setting": _setting(latest),
        "traced_steps": traced_steps,
        "ops": _by_direction(trace.ops),
        "flops": _by_direction(trace.flops),
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
            {
                "op": p.op,
                "module": p.module,
                "dtype": p.dtype,
                "shapes": _shapes(p.shapes),
                "reason": p.reason,
                "flops": flops,
            }
            for p, flops in trace.products.most_common()
            if not is_half(p.dtype)
        ],
        "odd_products": [
            {"op": p.op, "module": p.module, "shapes": _shapes(p.shapes), "odd": odd_dimensions(p), "flops": flops}
            for p, flops in trace.products.most_common()
            if is_half(p.dtype) and odd_dimensions(p)
        ],
        "slow": [] if latest is None else _slow(latest, models.devices),
    }


def merged(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of several processes as one: counts added up, everything else of the first that was initialized."""
    lead = next((one for one in facts if one["setting"]["initialized"]), facts[0])
    found = dict(lead)
    for name in ("traced_steps", "steps", "blocks", "skipped"):
        found[name] = sum(one[name] for one in facts)
    for name in ("ops", "flops"):
        found[name] = {
            direction: dict(sum((Counter(one[name][direction]) for one in facts), Counter[str]()).most_common())
            for direction in lead[name]
        }
    found["casts"] = _added(facts, "casts", ("count", "bytes"))
    for name in ("would_repay", "odd_products"):
        found[name] = _added(facts, name, ("flops",))
    modules: dict[str, Counter[str]] = {}
    for one in facts:
        for entry in one["modules"]:
            modules.setdefault(entry["module"], Counter()).update(entry["flops"])
    found["modules"] = _ordered(modules)
    found["whole_steps"] = all(one["whole_steps"] for one in facts)
    sums = ("forward_results", "forward_results_in_float32")
    found["memory"] = {**lead["memory"], **{key: sum(one["memory"][key] for one in facts) for key in sums}}
    return found


def _added(facts: list[dict[str, Any]], name: str, counts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of the list ``name``, those alike in all but ``counts`` added up, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for one in facts for row in one[name]):
        key = repr([value for column, value in row.items() if column not in counts])
        if key in rows:
            rows[key] = {**row, **{column: rows[key][column] + row[column] for column in counts}}
        else:
            rows[key] = row
    return sorted(rows.values(), key=lambda row: -row[counts[0]])


def completed(facts: dict[str, Any]) -> dict[str, Any]:
    """``facts`` with what follows from its counts, and the sentences."""
    facts["half_flops_share"] = half_share(facts)
    facts["why_float32"] = why_float32(facts)
    facts["sentences"] = sentences(facts)
    return facts


def why_float32(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Why forward products were not half: each reason with its share of the forward FLOPs and its modules."""
    total = sum(facts["flops"]["forward"].values()) + sum(facts["flops"]["no grad"].values())
    found: dict[str, dict[str, Any]] = {}
    for row in facts["would_repay"] if facts["setting"]["half"] else ():
        entry = found.setdefault(row["reason"], {"reason": row["reason"], "share": 0.0, "modules": []})
        entry["share"] += row["flops"] / max(total, 1)
        if row["module"] not in entry["modules"]:
            entry["modules"].append(row["module"])
    return sorted(found.values(), key=lambda entry: -entry["share"])


def sentences(facts: dict[str, Any]) -> list[str]:
    """Sum up in sentences; the first says whether half precision is on, or that the script crashed."""
    share, found = facts["half_flops_share"], []
    half = facts["setting"]["half"]
    if facts.get("ending"):
        found.append(facts["ending"])
    if not any(is_half(dtype) for counts in facts["ops"].values() for dtype in counts):
        found.append(f"Nothing ran in half precision: {_why_nothing(facts)}")
    elif share is None:
        found.append(f"Ops ran in {half}, but no matrix product, convolution or attention among them.")
    elif share < MOSTLY:
        found.append(f"Mostly float32: {_percent(share)} of the FLOPs ran in {half or 'half'}.")
    else:
        found.append(f"Half precision is on: {_percent(share)} of the FLOPs ran in {half or 'half'}.")
    if share is not None and share < MOSTLY and facts["why_float32"]:
        found.append("In float32, of the forward: " + "; ".join(map(_why, facts["why_float32"])) + ".")
    found += facts["slow"]
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
    return [*found, *facts.get("of_processes", [])]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _why(entry: dict[str, Any]) -> str:
    """As in "60.0 % kept in float32 (head, tail)"."""
    modules = entry["modules"]
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    reason = entry["reason"] or "for a reason that is not known"
    return f"{_percent(entry['share'])} {reason} ({', '.join(modules[:SHOWN])}{more})"


def _slow(latest: Any, devices: list[str]) -> list[str]:
    return [text for text in (slow_halves(one, latest.half) for one in devices) if text and _setting(latest)["half"]]


def _why_nothing(facts: dict[str, Any]) -> str:
    setting = facts["setting"]
    if not setting["initialized"]:
        if facts["children_counted"]:
            return "amp.initialize was not called, neither in the script nor in a process that it started."
        return "amp.initialize was not called in this process; what it started is in receipts of `ampcompat run` only."
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


def half_share(facts: dict[str, Any]) -> float | None:
    """Share of the FLOPs in half; None where there are none."""
    flops = sum((Counter(counts) for counts in facts["flops"].values()), Counter[str]())
    total = sum(flops.values())
    return sum(count for dtype, count in flops.items() if is_half(dtype)) / total if total else None


def _modules(trace: OpTrace) -> list[dict[str, Any]]:
    by_module: dict[str, Counter[str]] = {}
    for (module, dtype), flops in trace.module_flops.items():
        by_module.setdefault(module, Counter())[dtype] += flops
    return _ordered(by_module)


def _ordered(modules: dict[str, Counter[str]]) -> list[dict[str, Any]]:
    ordered = sorted(modules.items(), key=lambda item: -sum(item[1].values()))
    return [{"module": module, "flops": dict(flops)} for module, flops in ordered]


def _results(trace: OpTrace) -> dict[str, int]:
    wide = sum((2 if is_half(dtype) else 1) * size for dtype, size in trace.results.items())
    now = sum(trace.results.values()) + trace.cast_results
    return {"forward_results": now, "forward_results_in_float32": wide}


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " · ".join("x".join(map(str, shape)) for shape in shapes[:2])
