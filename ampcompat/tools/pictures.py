"""The loss scale of the precision report, as a picture.

Needs matplotlib (the extra ``plot``); draws without a display.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
