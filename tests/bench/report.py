"""The document of a run: ``docs/benchmarks/<hardware>.md``, and the plot beside it."""

import math
import platform
import sys
import time
from pathlib import Path

import torch

_START = time.perf_counter()


def progress(line):
    """What was measured last, on stderr, with the seconds since the start."""
    sys.stderr.write(f"{time.perf_counter() - _START:5.0f} s  {line}\n")


def hardware(device):
    """A name for files, and a sentence."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        return name.lower().replace(" ", "-"), f"{name}, CUDA {torch.version.cuda}"
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]}, {len(names)} logical cores" if names else cpu
    return f"cpu-{platform.machine()}", f"{cpu}; one thread per process; no GPU"


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
    """Horizontal bars with quartiles: (label, Ratio). Needs matplotlib; returns whether it was there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(bars) + 1.2))
    medians = [ratio.median for _, ratio in bars]
    spread = [[r.median - r.low for _, r in bars], [r.high - r.median for _, r in bars]]
    axes.barh([label for label, _ in bars], medians, xerr=spread, color="#4878a8", ecolor="#333333", capsize=2)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("step time, as a ratio (below 1: ampcompat is faster)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
