"""The receipt as one page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import json
from html import escape

from ampcompat.tools.report import processes, svg
from ampcompat.tools.report.schema import Counts, Facts
from ampcompat.tools.report.text import bytes_text, half_share, memory_rows, parameter_rows, repay_rows, run_rows, unit

_STYLE = """
.receipt { --ink: #1b1f24; --faint: #6a737d; --line: #d8dee4; --paper: #fff; --half: #1a7f5a; --wide: #b7bec7;
  --other: #d4a72c; --skip: #cf222e; }
@media (prefers-color-scheme: dark) { .receipt { --ink: #e6edf3; --faint: #8b949e; --line: #30363d; --paper: #0d1117;
  --half: #3fb98a; --wide: #57606a; --other: #d4a72c; --skip: #ff7b72; } }
.receipt { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 760px;
  margin: 2em auto; padding: 0 1em; }
.receipt h1 { font-size: 1.5em; margin-bottom: 0; } .receipt h2 { font-size: 1.1em; margin: 2em 0 .4em; }
.receipt .sub, .receipt .legend { color: var(--faint); } .receipt .lead { font-size: 1.15em; font-weight: 600; }
.receipt table { border-collapse: collapse; width: 100%; font-size: .9em; }
.receipt th, .receipt td { text-align: left; padding: .25em .8em .25em 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
.receipt svg { max-width: 100%; height: auto; } .receipt svg text { fill: var(--ink); font-size: 12px; }
.receipt text.label { text-anchor: end; } .receipt text.tick { text-anchor: middle; fill: var(--faint); }
.receipt tspan { font-size: 9px; } .receipt .half { fill: var(--half); } .receipt .wide { fill: var(--wide); }
.receipt .other { fill: var(--other); } .receipt .grid { stroke: var(--line); }
.receipt .line { fill: none; stroke: var(--half); stroke-width: 2; } .receipt .line1 { stroke: var(--other); }
.receipt .line2 { stroke: var(--faint); } .receipt .line3 { stroke: var(--wide); } .receipt .skip { fill: var(--skip); }
.receipt .key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
"""


def render(facts: Facts) -> str:
    """The whole page, with the data in it."""
    data = json.dumps(facts).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Precision receipt</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f'<body class="receipt">{_body(facts)}'
        f'<script type="application/json" id="receipt">{data}</script></body></html>\n'
    )


def fragment(facts: Facts) -> str:
    """The same as a part of another page, whose own looks it leaves alone."""
    return f'<style>{_STYLE}</style><div class="receipt">{_body(facts)}</div>'


def _body(facts: Facts) -> str:
    setting = facts["setting"]
    steps, each = unit(facts)
    lead, *others = facts["sentences"]
    half = setting["half"] or "half"
    about = [
        f"opt_level {setting['opt_level']}",
        f"half is {setting['half'] or 'not used'}",
        f"torch {facts['torch']}",
        f"{facts['traced_steps']} traced of {facts['steps']} steps",
    ]
    parts = [
        "<h1>Precision receipt</h1>",
        f'<p class="sub">{escape(" · ".join(about))}</p>',
        f'<p class="lead">{escape(lead)}</p>',
        "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in others) + "</ul>" if others else "",
    ]
    legend = (
        f'<p class="legend"><span class="key" style="background:var(--half)"></span>{escape(half)}'
        '<span class="key" style="background:var(--wide)"></span>float32'
        '<span class="key" style="background:var(--other)"></span>other</p>'
    )
    flops = [(direction, _per_step(counts, steps)) for direction, counts in facts["flops"].items() if counts]
    ops = [(direction, _per_step(counts, steps)) for direction, counts in facts["ops"].items() if counts]
    parts += [_section(f"FLOPs {each}", legend + svg.bars(flops))] if flops else []
    parts += [_section(f"Ops {each}", legend + svg.bars(ops, lambda n: f"{n:.0f}"))] if ops else []
    if facts["modules"]:
        rows = [(m["module"], _per_step(m["flops"], steps)) for m in facts["modules"][:20]]
        parts.append(_section(f"Forward FLOPs {each}, by module", legend + svg.bars(rows)))
    if facts["history"] and facts["setting"]["half"]:
        colours = ("half", "other", "faint", "wide")
        scalers = range(len(facts["history"][0]["scales"]))
        keys = [(colours[n % 4], f"scaler {n}") for n in scalers if len(scalers) > 1] + [("skip", "skipped step")]
        shown = "".join(f'<span class="key" style="background:var(--{c})"></span>{name}' for c, name in keys)
        plot = svg.scale_history(facts["history"])
        parts.append(_section("Loss scale", f'<p class="legend">{shown}</p>{plot}'))
    parts.append(_section("Memory", _table(["", "now", "all float32"], memory_rows(facts))))
    parts.append(_section("Parameters", _table(["dtype", "parameters", "modules"], parameter_rows(facts))))
    casts = [[c["from"], c["to"], str(c["count"]), bytes_text(c["bytes"])] for c in facts["casts"]]
    parts.append(_section("Casts", _table(["from", "to", "casts", "bytes"], casts)))
    columns = ["op", "module", "shapes", f"FLOPs {each}", "why float32"]
    repay = _table(columns, repay_rows(facts))
    parts.append(_section("Float32 products that would most repay half precision", repay))
    odd = [[r["op"], r["module"], r["shapes"], ", ".join(map(str, r["odd"]))] for r in facts["odd_products"][:20]]
    columns = ["op", "module", "shapes", "dimensions"]
    parts.append(_section("Half products with dimensions that are no multiple of 8", _table(columns, odd)))
    held = [[m["module"], f"{100 * half_share(m['flops']):.0f} %"] for m in facts["modules"]]
    parts.append(_section("Share in half, by module", _table(["module", "forward FLOPs in half"], held)))
    modules = [[p["module"] or p["type"], p["type"], p["dtype"], f"{p['count']:,}"] for p in facts["parameters"]]
    parts.append(_section("Parameters by module", _table(["module", "type", "dtype", "parameters"], modules)))
    parts.append(_section("Processes", _table(processes.COLUMNS, processes.table_rows(facts))))
    parts.append(_section("Run", _table([], run_rows(facts))))
    return "".join(parts)


def _per_step(counts: Counts, steps: int) -> dict[str, float]:
    return {dtype: count / steps for dtype, count in counts.items()}


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _table(columns: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    head = f"<tr>{head}</tr>" if head else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"
