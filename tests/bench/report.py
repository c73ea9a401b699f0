"""The document of a run: ``docs/benchmarks/<hardware>.md``, and the plot beside it."""

import math
import sys
import time
from dataclasses import dataclass, field

_START = time.perf_counter()


@dataclass
class Section:
    """A part of the page: its text, rows of the page's summary, and bars of its plot: (label, Ratio)."""

    text: str
    summary: list = field(default_factory=list)
    bars: list = field(default_factory=list)


def progress(line):
    """What was measured last, on stderr, with the seconds since the start."""
    sys.stderr.write(f"{time.perf_counter() - _START:5.0f} s  {line}\n")


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def geometric_mean(values):
    """Of positive numbers."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def verdict(value, limit):
    """A value beside what it shall not pass."""
    return f"{value:.3f}", f"≤ {limit}", "met" if round(value, 3) <= limit else "**missed**"


def plot(path, bars):
    """Draw horizontal bars with quartiles; returns whether matplotlib was there, and anything to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not bars:
        return False
    figure = Figure(figsize=(8, 0.32 * len(bars) + 1.2), layout="tight")
    axes = figure.subplots()
    medians = [ratio.median for _, ratio in bars]
    spread = [[r.median - r.low for _, r in bars], [r.high - r.median for _, r in bars]]
    axes.barh([label for label, _ in bars], medians, xerr=spread, color="#4878a8", ecolor="#333333", capsize=2)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("step time, as a ratio (below 1: ampcompat is faster)")
    axes.invert_yaxis()
    figure.savefig(path)
    return True
