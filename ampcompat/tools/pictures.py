"""The one writer of pictures: the loss scale of the precision report, and ``parity.png``.

Needs matplotlib (the extra ``plot``); draws without a display.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ampcompat.tools.core import LEVELS
from ampcompat.tools.parity.compare import Result, Tolerance
from ampcompat.tools.recording.steps import Step

# -- the loss scale, for the page of the precision report --------------------------------------------------------------
SKIPPED = "#cf222e"
LINES = ("#1a7f5a", "#d4a72c", "#6a737d", "#b7bec7")


def loss_scales(steps: Sequence[Step]) -> str:
    """The loss scales over the steps, on a log axis, with skipped steps marked: an SVG in base64."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    axes = figure.subplots()
    scalers = sorted({one.loss_id for step in steps for one in step.scales})
    for at, loss_id in enumerate(scalers):
        points = [(step.step, one.scale) for step in steps for one in step.scales if one.loss_id == loss_id]
        label = f"scaler {loss_id}" if len(scalers) > 1 else ""
        axes.plot(*zip(*points, strict=True), color=LINES[at % len(LINES)], label=label)
    skipped = [(step.step, min(one.scale for one in step.scales)) for step in steps if step.skipped and step.scales]
    if skipped:
        numbers, marks = zip(*skipped, strict=True)
        axes.scatter(numbers, marks, s=18, color=SKIPPED, zorder=3, label="skipped step")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode("ascii")


# -- parity.png: losses, their deviation from O0, and the loss scale with its skipped steps ----------------------------
#: Okabe and Ito's colours, which the colour-blind can tell apart; a level keeps its colour in each dtype.
PALETTE = ("#000000", "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7", "#F0E442")
#: Later runs are drawn over earlier ones, thinner, so that curves that coincide can be told from missing ones.
WIDEST, THINNEST = 3.2, 0.9
LABELS = ("loss", "relative deviation\nfrom O0", "loss scale")
#: A deviation of 0 is drawn here: the axis is logarithmic.
SMALLEST = 1e-8


def save_comparison(path: Path, results: Sequence[Result], tolerance: Tolerance, title: str) -> None:
    """Write the picture, a PNG; each optimizer of the script has a column of its own."""
    with matplotlib.rc_context({"font.size": 8.0, "axes.grid": True, "grid.color": "0.9", "grid.linewidth": 0.5}):
        optimizers = sorted({step.optimizer for result in results for step in result.run.steps}) or [0]
        figure = Figure(figsize=(max(6.0, 3.6 * len(optimizers)), 5.6), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        grid = figure.subplots(3, len(optimizers), sharex=True, squeeze=False, height_ratios=[1.3, 1.1, 0.8])
        for column, optimizer in enumerate(optimizers):
            panels = list(grid[:, column])
            for row, result in enumerate(results):
                _draw(panels, result, optimizer, row)
            _finish(panels, results, tolerance)
            if len(optimizers) > 1:
                panels[0].set_title(f"optimizer {optimizer}")
        for panel, label in zip(grid[:, 0], LABELS, strict=True):
            panel.set_ylabel(label)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        handles.append(grid[2, 0].scatter([], [], marker="x", s=22, color="0.3"))
        labels.append("skipped step")
        place = {"loc": "outside upper center", "ncols": 3, "frameon": False, "alignment": "left"}
        figure.legend(handles, labels, title=title, title_fontsize=9, **place)
        figure.savefig(path)


def colour_of(opt_level: str) -> str:
    """The colour of a level: by its place in amp's table."""
    return PALETTE[list(LEVELS).index(opt_level) % len(PALETTE)]


def _draw(panels: Sequence[Axes], result: Result, optimizer: int, row: int) -> None:
    """Draw the curves of one level; steps without a finite loss are marked in the row numbered ``row`` from above."""
    losses, deviation, scale = panels
    level = result.run.level
    colour = colour_of(level.opt_level)
    width = max(WIDEST / 1.4**row, THINNEST)
    curve: dict[str, Any] = {
        "color": colour,
        "linestyle": "--" if level.dtype == "bfloat16" else "-",
        "linewidth": width,
        "zorder": 5.0 - width,
    }
    steps = [(step, apart) for step, apart in result.steps() if step.optimizer == optimizer]
    apart = [None if one is None else max(one, SMALLEST) for _, one in steps]
    numbers = [step.step for step, _ in steps]
    lost = [step.step for step, _ in steps if step.is_lost]
    skipped = [step for step, _ in steps if step.skipped]
    label = f"{level.name} (not finite from {lost[0]})" if lost else level.name
    losses.plot(numbers, [_finite(step.loss) for step, _ in steps], label=label, **curve)
    # Along the upper edge: a curve that ends, or was never there, is seen to be lost.
    edge = losses.get_xaxis_transform()
    losses.scatter(lost, [0.97 - 0.045 * row] * len(lost), marker="v", s=12, color=colour, transform=edge, zorder=6)
    deviation.plot(numbers, [_finite(one) for one in apart], **curve)
    scale.plot(numbers, [_finite(step.scale) for step, _ in steps], **curve)
    at_skipped = [_finite(step.scale) for step in skipped]
    scale.scatter([step.step for step in skipped], at_skipped, marker="x", s=22, color=colour, zorder=6)


def _finish(panels: Sequence[Axes], results: Sequence[Result], tolerance: Tolerance) -> None:
    """Set the scales and ticks of one column."""
    losses, deviation, scale = panels
    steps = [step for result in results for step in result.run.steps]
    losses.margins(y=0.15)  # room for the marks of what is not finite
    reference = [step.loss for step in results[0].run.steps if step.loss is not None]
    if reference and min(reference) > 0 and 20 * min(reference) < max(reference) < math.inf:
        losses.set_yscale("log")
    deviations = [apart for result in results if result.deviation for apart in result.deviation.by_step if apart]
    _set_log_scale(deviation, [max(apart, SMALLEST) for apart in deviations] + [tolerance.rtol])
    if tolerance.rtol:
        deviation.axhline(tolerance.rtol, color="0.45", linewidth=0.8, linestyle=":", zorder=1)
        at = (0.01, tolerance.rtol)
        deviation.annotate(f"rtol {tolerance.rtol:g}", at, xycoords=("axes fraction", "data"), va="bottom", color="0.3")
    _set_log_scale(scale, [step.scale for step in steps if step.scale is not None], base=2)
    scale.set_xlabel("optimizer step")
    scale.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for panel in panels:
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)


def _set_log_scale(panel: Axes, values: Sequence[float], base: int = 10) -> None:
    """A logarithmic axis with room around ``values``, as far as they can be drawn."""
    drawn = [value for value in values if 0 < value < math.inf] or [1.0]
    panel.set_yscale("log", base=base)
    panel.set_ylim(min(drawn) / 1.5, max(drawn) * 1.5)


def _finite(value: float | None) -> float:
    """``value``, or NaN, which leaves a gap in a curve."""
    return value if value is not None and math.isfinite(value) else math.nan
