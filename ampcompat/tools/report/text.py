"""The receipt as a terminal shows it."""

from __future__ import annotations

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report import processes
from ampcompat.tools.report.schema import Counts, Facts

#: Rows shown of long tables; the JSON has all.
TOP = 10


def unit(facts: Facts) -> tuple[int, str]:
    """Return the divisor of counts and its unit: a step, if whole steps were traced and nothing else."""
    return (facts["traced_steps"], "a step") if facts["whole_steps"] else (1, "in all")


def traced(facts: Facts) -> str:
    """Of what the ops are."""
    steps, several = facts["traced_steps"], len(facts["processes"]) > 1
    if facts["whole_steps"]:
        return f"{steps} traced steps" + (f" of {len(facts['processes'])} processes" if several else "")
    if not steps:
        return "the script, of which no optimizer step was traced"
    return f"the script, {steps} whole steps among them"


def run_rows(facts: Facts) -> list[list[str]]:
    """Say what was run, when, and on which machine."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return [
        ["script", " ".join([facts["script"], *facts["arguments"]])],
        ["date", f"{facts['date']}, {facts['seconds']:g} s"],
        ["versions", versions],
    ]


def render(facts: Facts) -> str:
    """Sentences, then tables."""
    setting = facts["setting"]
    steps, each = unit(facts)
    head = f"precision receipt: opt_level {setting['opt_level']}, half is {setting['half'] or 'not used'}"
    parts = ["\n".join([head, *(f"  {sentence}" for sentence in facts["sentences"])])]
    rows = [
        [direction, dtype, str(count), flops_text(facts["flops"][direction].get(dtype, 0))]
        for direction, counts in facts["ops"].items()
        for dtype, count in counts.items()
    ]
    parts.append(table(f"ops in {traced(facts)}", ["pass", "dtype", "ops", "FLOPs"], rows))
    parts.append(
        table(
            "casts",
            ["from", "to", "casts", "bytes"],
            [[c["from"], c["to"], str(c["count"]), bytes_text(c["bytes"])] for c in facts["casts"]],
        )
    )
    parts.append(
        table(
            "forward FLOPs by module",
            ["module", "in half", f"FLOPs {each}"],
            [
                [m["module"], f"{100 * half_share(m['flops']):.0f} %", flops_text(sum(m["flops"].values()) / steps)]
                for m in facts["modules"][:TOP]
            ],
        )
    )
    parts.append(table("parameters", ["dtype", "parameters", "modules"], parameter_rows(facts)))
    parts.append(table("memory", ["", "now", "all float32"], memory_rows(facts)))
    parts.append(
        table(
            "float32 products that would most repay half precision",
            ["op", "module", "shapes", f"FLOPs {each}", "why float32"],
            repay_rows(facts),
        )
    )
    parts.append(
        table(
            "half products with dimensions that are no multiple of 8",
            ["op", "module", "shapes", "dimensions"],
            [[r["op"], r["module"], r["shapes"], ", ".join(map(str, r["odd"]))] for r in facts["odd_products"][:TOP]],
        )
    )
    parts.append(table("processes", processes.COLUMNS, processes.table_rows(facts)))
    parts.append(table("run", [], run_rows(facts)))
    return "\n\n".join(filter(None, parts))


def table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """A table with its title; "" without rows. No columns: no line of their names."""
    if not rows:
        return ""
    head = [columns] if columns else []
    widths = [max(map(len, column)) for column in zip(*head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (*head, *rows)]
    if columns:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def half_share(flops: Counts) -> float:
    """Share of ``flops`` (by dtype) in half."""
    return sum(n for dtype, n in flops.items() if is_half(dtype)) / max(sum(flops.values()), 1)


def parameter_rows(facts: Facts) -> list[list[str]]:
    """Parameters by dtype."""
    rows = []
    for dtype in sorted({p["dtype"] for p in facts["parameters"]}):
        held = [p for p in facts["parameters"] if p["dtype"] == dtype]
        rows.append([dtype, f"{sum(p['count'] for p in held):,}", str(len(held))])
    return rows


def repay_rows(facts: Facts) -> list[list[str]]:
    """Float32 products, largest first, and why they are not half."""
    steps, _ = unit(facts)
    return [
        [r["op"], r["module"], r["shapes"], flops_text(r["flops"] / steps), r["reason"]]
        for r in facts["would_repay"][:TOP]
    ]


def memory_rows(facts: Facts) -> list[list[str]]:
    """Memory now and as it would be in float32."""
    memory = facts["memory"]
    steps, each = unit(facts)
    now, wide = memory["forward_results"] / steps, memory["forward_results_in_float32"] / steps
    rows = [
        ["weights and buffers", bytes_text(memory["weights"]), bytes_text(memory["weights_in_float32"])],
        ["master weights", bytes_text(memory["masters"]), bytes_text(0)],
        [f"forward results {each}", bytes_text(now), bytes_text(wide)],
    ]
    if memory["peak"] is not None:
        rows.append(["peak on the device", bytes_text(memory["peak"]), ""])
    return rows


def flops_text(flops: float) -> str:
    """With a metric prefix, as in "1.5 G"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= limit:
            return f"{flops / limit:.3g} {unit}"
    return f"{flops:.0f}"


def bytes_text(size: float) -> str:
    """With a binary prefix, as in "1.5 MiB"."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{size:.0f} B"
