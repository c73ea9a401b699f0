"""The receipt's plots, drawn by matplotlib without a display."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report.schema import Counts, Facts, Point
from ampcompat.tools.report.tables import flops_text, unit

WIDTH = 7.2
ROW_HEIGHT = 0.26
#: Modules in the plot, those of most FLOPs.
MODULES = 20
LONGEST_LABEL = 30
HALF, FLOAT32, OTHER, SKIPPED = "#1a7f5a", "#b7bec7", "#d4a72c", "#cf222e"
LINES = (HALF, OTHER, "#6a737d", FLOAT32)


@dataclass
class Plot:
    """Hold a plot.

    Attributes:
        title: What it shows.
        svg: The image, in base64.
    """

    title: str
    svg: str


def plots(facts: Facts) -> list[Plot]:
    """The plots of what ran."""
    # Names of modules are plain text: a dollar in them begins no formula, and no font here may have their letters.
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        return _plots(facts)


def _plots(facts: Facts) -> list[Plot]:
    steps, each = unit(facts)
    shown = []
    if any(facts.flops.values()):
        shown.append(_bars(f"FLOPs {each}", facts.flops, steps))
    if any(facts.ops.values()):
        shown.append(_bars(f"Ops {each}", facts.ops, steps, note="{:.0f}".format))
    if facts.modules:
        by_module = {one.module: one.flops for one in facts.modules[:MODULES]}
        shown.append(_bars(f"Forward FLOPs {each}, by module", by_module, steps))
    if facts.setting.half and any(scale > 0 for point in facts.history for scale in point.scales):
        shown.append(_scales("Loss scale", facts.history))
    return shown


def _bars(title: str, rows: dict[str, Counts], steps: int, note: Callable[[float], str] = flops_text) -> Plot:
    """Horizontal bars, stacked by dtype, half first.

    Args:
        title: What is counted.
        rows: A label, and the count of each dtype.
        steps: What counts are divided by.
        note: Writes the total of a row.
    """
    rows = {label: counts for label, counts in rows.items() if counts}
    figure = _figure(ROW_HEIGHT * len(rows) + 0.5)
    axes = figure.subplots()
    labels = [_short(label) for label in rows]
    drawn: set[str] = set()
    for row, counts in enumerate(rows.values()):
        left = 0.0
        for dtype, count in sorted(counts.items(), key=lambda item: not is_half(item[0])):
            size = count / steps
            label = "" if dtype in drawn else dtype
            axes.barh(row, size, left=left, height=0.7, color=_colour(dtype), label=label)
            drawn.add(dtype)
            left += size
        axes.annotate(note(left), (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.12)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    _legend(axes)
    return Plot(title, _svg(figure))


def _scales(title: str, points: Sequence[Point]) -> Plot:
    """The loss scales over the steps, on a log axis; skipped steps are marked."""
    figure = _figure(2.4)
    axes = figure.subplots()
    scalers = max(len(point.scales) for point in points)
    for index in range(scalers):
        steps = [point.step for point in points if index < len(point.scales)]
        scales = [point.scales[index] or math.nan for point in points if index < len(point.scales)]
        axes.plot(steps, scales, color=LINES[index % len(LINES)], label=f"scaler {index}" if scalers > 1 else "")
    skipped = _skipped(points)
    if skipped:
        steps = [point.step for _, point in skipped]
        marks = [_scale_of_mark(before, point) for before, point in skipped]
        axes.scatter(steps, marks, s=18, color=SKIPPED, zorder=3, label="skipped step")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)
    return Plot(title, _svg(figure))


def _skipped(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Each point of a skipped step, after the point before it."""
    pairs = zip([points[0], *points], points, strict=False)
    return [(before, point) for before, point in pairs if point.skipped]


def _scale_of_mark(before: Point, point: Point) -> float:
    """The scale that came down at a skipped step; at the floor none does."""
    fell = [now for then, now in zip(before.scales, point.scales, strict=False) if now < then]
    return fell[0] if fell else min(scale for scale in point.scales if scale > 0)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=8, frameon=False)


def _colour(dtype: str) -> str:
    if is_half(dtype):
        return HALF
    return FLOAT32 if dtype == "float32" else OTHER


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else "…" + label[1 - LONGEST_LABEL :]


def _svg(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode("ascii")
