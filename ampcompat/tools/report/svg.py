"""Plots as inline SVG: bars, and the loss scale over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report.schema import Point
from ampcompat.tools.report.text import flops_text

WIDTH, LABEL, ROW = 720, 220, 24


def _kind(dtype: str) -> str:
    return "half" if is_half(dtype) else "wide" if dtype == "float32" else "other"


def bars(rows: Sequence[tuple[str, dict[str, float]]], note: Callable[[float], str] = flops_text) -> str:
    """Horizontal bars, stacked by dtype.

    Args:
        rows: A label, and the size of each dtype's part.
        note: Writes the total of a row.
    """
    longest = max((sum(parts.values()) for _, parts in rows), default=0) or 1
    scale = (WIDTH - LABEL - 90) / longest
    out = [_open(ROW * len(rows) + 4)]
    for index, (label, parts) in enumerate(rows):
        y, x = index * ROW + 4, float(LABEL)
        shown = label if len(label) <= 30 else "…" + label[-29:]
        out.append(f'<text x="{LABEL - 8}" y="{y + 13}" class="label">{escape(shown)}</text>')
        for dtype, size in sorted(parts.items(), key=lambda item: not is_half(item[0])):
            title = f"<title>{escape(label)}: {escape(note(size))} in {dtype}</title>"
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="16" class="{_kind(dtype)}">{title}'
            )
            out.append("</rect>")
            x += size * scale
        out.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escape(note(sum(parts.values())))}</text>')
    return "".join([*out, "</svg>"])


def scale_history(points: Sequence[Point]) -> str:
    """The loss scales over the steps, on a log axis; skipped steps are marked."""
    top, height, left, right = 10, 180, 70, WIDTH - 20
    scales = [scale for point in points for scale in point["scales"] if scale > 0]
    if not scales:
        return ""
    low, high = math.floor(math.log2(min(scales))) - 0.5, math.ceil(math.log2(max(scales))) + 0.5
    first, last = points[0]["step"], max(points[-1]["step"], points[0]["step"] + 1)

    def x(step: int) -> float:
        return float(left + (right - left) * (step - first) / (last - first))

    def y(scale: float) -> float:
        return float(top + height * (1 - (math.log2(scale) - low) / (high - low)))

    out = [_open(top + height + 40)]
    every = max(1, round((high - low) / 8))
    for power in range(math.ceil(low), math.floor(high) + 1, every):
        at = y(2.0**power)
        out.append(f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="grid"/>')
        out.append(f'<text x="{left - 8}" y="{at + 4:.1f}" class="label">2<tspan dy="-5">{power}</tspan></text>')
    for tick in range(first - first % -_round(last - first), last + 1, _round(last - first)):
        out.append(f'<text x="{x(tick):.1f}" y="{top + height + 16}" class="tick">{tick}</text>')
    out.append(f'<text x="{(left + right) / 2:.0f}" y="{top + height + 34}" class="tick">optimizer step</text>')
    for index in range(max(len(point["scales"]) for point in points)):
        line = " ".join(
            f"{x(p['step']):.1f},{y(p['scales'][index]):.1f}"
            for p in points
            if index < len(p["scales"]) and p["scales"][index] > 0
        )
        out.append(
            f'<polyline points="{line}" class="line line{index % 4}"><title>loss scaler {index}</title></polyline>'
        )
    for before, point in zip([points[0], *points], points, strict=False):
        if point["skipped"]:
            # At the scaler that came down; at the floor none does.
            fell = [now for then, now in zip(before["scales"], point["scales"], strict=False) if now < then]
            at = (fell or [min(s for s in point["scales"] if s > 0)])[0]
            title = f"<title>step {point['step']} skipped, scale now {at:g}</title>"
            out.append(f'<circle cx="{x(point["step"]):.1f}" cy="{y(at):.1f}" r="4" class="skip">{title}</circle>')
    return "".join([*out, "</svg>"])


def _round(span: int) -> int:
    """A round distance of ticks, of which about five fit into ``span``."""
    power = 10 ** max(0, math.floor(math.log10(max(span, 1) / 5)))
    return int(next((power * n for n in (1, 2, 5, 10) if span / (power * n) <= 6), power * 10))


def _open(height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
