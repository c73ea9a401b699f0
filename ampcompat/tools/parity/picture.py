"""The comparison as one picture: losses, their deviation from O0, and the loss scale with its skipped steps.

Needs matplotlib (the extra ``plot``); draws without a display.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image

from ampcompat.tools.parity.compare import Result, Tolerance, first_not_finite

#: Okabe and Ito's colours, which the colour-blind can tell apart; O0 is black, a level keeps its colour in each dtype.
COLOURS = {"O0": "#000000", "O1": "#0072B2", "O2": "#D55E00", "O3": "#009E73", "O4": "#56B4E9", "O5": "#E69F00"}
#: Later levels are drawn over earlier ones, thinner, so that curves that coincide can be told from missing ones.
WIDTHS = {"O0": 3.2, "O1": 2.2, "O4": 2.0, "O2": 1.4, "O5": 1.2, "O3": 0.9}
SMALLEST = 1e-8
FONT = 8.0


def save_picture(path: Path, results: Sequence[Result], tolerance: Tolerance, title: str, window: int = 1) -> None:
    """Write the picture, a PNG; each optimizer of the script has a column of its own."""
    optimizers = sorted({step.optimizer for result in results for step in result.run.steps}) or [0]
    width = 6.0 if len(optimizers) == 1 else 3.6 * len(optimizers)
    figure = Figure(figsize=(width, 5.6), layout="constrained", dpi=150)
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(optimizers), sharex=True, squeeze=False, height_ratios=[1.3, 1.1, 0.8])
    for column, optimizer in enumerate(optimizers):
        panels = list(grid[:, column])
        lost = [result for result in results if first_not_finite(result.run)]
        if lost:  # leave room for the rows of marks
            panels[0].margins(y=0.05 + 0.06 * len(lost))
        for result in results:
            _draw(panels, result, optimizer, lost.index(result) if result in lost else 0)
        _finish(panels, results, optimizer, tolerance)
        if len(optimizers) > 1:
            panels[0].set_title(f"optimizer {optimizer}", fontsize=FONT)
        for panel, label in zip(panels, ("loss", "relative deviation\nfrom O0", "loss scale"), strict=True):
            panel.set_ylabel(label if column == 0 else "", fontsize=FONT)
    if window > 1:
        grid[1, 0].set_ylabel(f"relative deviation from O0\n(means of {window} steps)", fontsize=FONT)
    figure.align_ylabels(grid[:, 0])
    _legend(figure, grid[0, 0], grid[2, 0], results, title)
    canvas.draw()
    # A palette: a third of the bytes, and no eye sees it in a line drawing.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128).save(path, optimize=True)


def _draw(panels: Sequence[Axes], result: Result, optimizer: int, row: int) -> None:
    """Draw one level's curves; steps without a finite loss are marked in the row numbered ``row`` from above."""
    level = result.run.level
    style: dict[str, Any] = {
        "color": COLOURS[level.opt_level],
        "linestyle": (0, (4, 1.5)) if level.dtype == "bfloat16" else "-",
        "linewidth": WIDTHS[level.opt_level],
        "zorder": 5.0 - WIDTHS[level.opt_level],
    }
    deviations = result.deviation.by_step if result.deviation else []
    steps = [(i, step) for i, step in enumerate(result.run.steps) if step.optimizer == optimizer]
    numbers = [step.step for _, step in steps]
    lost = [step.step for _, step in steps if step.loss is not None and not math.isfinite(step.loss)]
    label = f"{level.name} (not finite from {lost[0]})" if lost else level.name
    panels[0].plot(numbers, [_finite(step.loss) for _, step in steps], label=label, **style)
    # Along the upper edge, a row per level: a curve that ends, or was never there, is seen to be lost.
    place: dict[str, Any] = {"transform": panels[0].get_xaxis_transform(), "clip_on": False, "zorder": 6}
    panels[0].scatter(lost, [0.97 - 0.045 * row] * len(lost), marker="v", s=12, color=style["color"], **place)
    panels[2].plot(numbers, [_finite(step.scale) for _, step in steps], **style)
    skips = [step for _, step in steps if step.skipped]
    scales = [_finite(step.scale) for step in skips]
    panels[2].scatter([step.step for step in skips], scales, marker="x", s=22, color=style["color"], zorder=6)
    if result.deviation:
        values = [deviations[i] if i < len(deviations) else None for i, _ in steps]
        panels[1].plot(numbers, [_on_log_axis(value) for value in values], **style)


def _finish(panels: Sequence[Axes], results: Sequence[Result], optimizer: int, tolerance: Tolerance) -> None:
    """Scales, ticks and grids of one column."""
    losses, deviation, scale = panels
    known = [s.loss for r in results[:1] for s in r.run.steps if s.optimizer == optimizer and s.loss is not None]
    if known and min(known) > 0 and max(known) > 20 * min(known) and all(map(math.isfinite, known)):
        losses.set_yscale("log")
    deviation.set_yscale("log")
    seen = [max(d, SMALLEST) for r in results if r.deviation for d in r.deviation.by_step if d and math.isfinite(d)]
    marks = [*seen, tolerance.rtol] if tolerance.rtol else seen or [1.0]
    deviation.set_ylim(min(marks) / 2, max(marks) * 2)
    if tolerance.rtol:
        deviation.axhline(tolerance.rtol, color="0.45", linewidth=0.8, linestyle=":", zorder=1)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (0, 2)}
        deviation.annotate(
            f"rtol {tolerance.rtol:g}", (0.01, tolerance.rtol), fontsize=FONT - 1.5, color="0.3", **place
        )
    _finish_scale(scale, results)
    for panel in panels:
        panel.grid(color="0.9", linewidth=0.5)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=FONT - 1)


def _finish_scale(panel: Axes, results: Sequence[Result]) -> None:
    """Powers of two, five of them or fewer."""
    scales = [step.scale for result in results for step in result.run.steps if step.scale]
    exponents = [math.log2(scale) for scale in scales if math.isfinite(scale)] or [0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    stride = max(1, -(-(high - low) // 4))
    panel.set_yscale("log", base=2)
    panel.set_ylim(2.0 ** (low - 1), 2.0 ** (high + 1))
    panel.yaxis.set_major_locator(FixedLocator([2.0**e for e in range(high, low - 1, -stride)]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{round(math.log2(value))}}}$"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("optimizer step", fontsize=FONT)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _legend(figure: Figure, losses: Axes, scale: Axes, results: Sequence[Result], title: str) -> None:
    """One column per level where there are two dtypes, else one row; the title above, where it takes its own row."""
    handles, labels = losses.get_legend_handles_labels()
    two_dtypes = len({result.run.level.dtype for result in results} - {None}) > 1
    if two_dtypes or any(step.skipped for result in results for step in result.run.steps):
        place = 1 if two_dtypes else len(labels)
        handles.insert(place, scale.scatter([], [], marker="x", s=22, color="0.3"))
        labels.insert(place, "skipped step")
    columns = -(-len(labels) // 2) if two_dtypes or max(map(len, labels)) > 16 else len(labels)
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=columns,
        fontsize=FONT - 0.5,
        frameon=False,
        title=title,
        title_fontsize=FONT + 1,
        alignment="left",
    )


def _finite(value: float | None) -> float:
    """``value``, or NaN, which leaves a gap in a curve."""
    return value if value is not None and math.isfinite(value) else math.nan


def _on_log_axis(value: float | None) -> float:
    """``value``, no deviation at all being drawn at the foot of the axis."""
    return math.nan if value is None or not math.isfinite(value) else max(value, SMALLEST)
