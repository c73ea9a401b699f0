"""The tables of the precision report, which the text and the page both show."""

from __future__ import annotations

from ampcompat.tools.report.facts import Facts, half_share
from ampcompat.tools.tables import Table


def report_tables(facts: Facts, most: int) -> list[Table]:
    """All tables but that of every module's parameters; of a long one the first ``most`` rows."""
    return [
        passes(facts),
        casts(facts),
        modules(facts, most),
        parameters(facts),
        memory(facts),
        wide_products(facts, most),
        odd_products(facts, most),
        run(facts),
    ]


def unit(facts: Facts) -> tuple[int, str]:
    """Return the divisor of counts and its unit: a step, if whole steps were traced and nothing else."""
    return (facts.traced_steps, "a step") if facts.whole_steps else (1, "in all")


def passes(facts: Facts) -> Table:
    """Ops and FLOPs of each pass, by dtype."""
    rows = []
    for direction, counts in facts.ops.items():
        for dtype, count in counts.items():
            flops = facts.flops[direction].get(dtype, 0)
            rows.append([direction, dtype, str(count), flops_text(flops)])
    return Table(f"ops in {_traced(facts)}", ["pass", "dtype", "ops", "FLOPs"], rows)


def _traced(facts: Facts) -> str:
    """Of what the ops are."""
    if facts.whole_steps:
        return f"{facts.traced_steps} traced steps"
    if not facts.traced_steps:
        return "the script, of which no optimizer step was traced"
    return f"the script, {facts.traced_steps} whole steps among them"


def casts(facts: Facts) -> Table:
    """Casts, by dtypes."""
    rows = [[one.source, one.target, str(one.count), bytes_text(one.bytes)] for one in facts.casts]
    return Table("casts", ["from", "to", "casts", "bytes"], rows)


def modules(facts: Facts, most: int) -> Table:
    """The modules of most FLOPs in the forward."""
    steps, each = unit(facts)
    rows = []
    for one in facts.modules[:most]:
        in_half = f"{100 * half_share(one.flops):.0f} %"
        rows.append([one.module, in_half, flops_text(sum(one.flops.values()) / steps)])
    return Table("forward FLOPs by module", ["module", "in half", f"FLOPs {each}"], rows)


def parameters(facts: Facts) -> Table:
    """Parameters by dtype."""
    rows = []
    for dtype in sorted({one.dtype for one in facts.parameters}):
        held = [one for one in facts.parameters if one.dtype == dtype]
        rows.append([dtype, f"{sum(one.count for one in held):,}", str(len(held))])
    return Table("parameters", ["dtype", "parameters", "modules"], rows)


def parameters_by_module(facts: Facts) -> Table:
    """Parameters of every module."""
    rows = [[one.module or one.type, one.type, one.dtype, f"{one.count:,}"] for one in facts.parameters]
    return Table("parameters by module", ["module", "type", "dtype", "parameters"], rows)


def memory(facts: Facts) -> Table:
    """Memory now and as it would be in float32."""
    used = facts.memory
    steps, each = unit(facts)
    made = used.forward_results / steps
    made_in_float32 = used.forward_results_in_float32 / steps
    rows = [
        ["weights and buffers", bytes_text(used.weights), bytes_text(used.weights_in_float32)],
        ["master weights", bytes_text(used.masters), bytes_text(0)],
        [f"forward results {each}", bytes_text(made), bytes_text(made_in_float32)],
    ]
    if used.peak is not None:
        rows.append(["peak on the device", bytes_text(used.peak), ""])
    return Table("memory", ["", "now", "all float32"], rows)


def wide_products(facts: Facts, most: int) -> Table:
    """Float32 products, largest first, and why they are not half."""
    steps, each = unit(facts)
    rows = []
    for one in facts.would_repay[:most]:
        rows.append([one.op, one.module, one.shapes, flops_text(one.flops / steps), one.reason])
    columns = ["op", "module", "shapes", f"FLOPs {each}", "why float32"]
    return Table("float32 products that would most repay half precision", columns, rows)


def odd_products(facts: Facts, most: int) -> Table:
    """Half products with odd dimensions, largest first."""
    rows = [[one.op, one.module, one.shapes, ", ".join(map(str, one.odd))] for one in facts.odd_products[:most]]
    title = "half products with dimensions that are not multiples of 8"
    return Table(title, ["op", "module", "shapes", "dimensions"], rows)


def run(facts: Facts) -> Table:
    """Say what was run, when, and on which machine."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    rows = [
        ["script", " ".join([facts.script, *facts.arguments])],
        ["date", f"{facts.date}, {facts.seconds:g} s"],
        ["versions", versions],
    ]
    return Table("run", [], rows)


def flops_text(flops: float) -> str:
    """With a metric prefix, as in "1.5 G"."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= limit:
            return f"{flops / limit:.3g} {prefix}"
    return f"{flops:.0f}"


def bytes_text(size: float) -> str:
    """With a binary prefix, as in "1.5 MiB"."""
    for limit, prefix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{size / limit:.1f} {prefix}"
    return f"{size:.0f} B"
