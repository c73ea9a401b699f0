"""A precision report as text and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from ampcompat.tools.data import plain
from ampcompat.tools.recording.steps import Step
from ampcompat.tools.report.facts import Facts, is_constant, scale_text
from ampcompat.tools.tables import aligned
from ampcompat.tools.words import counted

#: Rows of the table of ops that the text shows; page and JSON have all.
ROWS_OF_TEXT = 30
#: The size of the picture of the loss scale.
WIDTH, HEIGHT = 700, 160
MOST_LABELS = 7
COLUMNS = ["op", "pass", "dtype", "count", "FLOPs"]


def as_text(facts: Facts) -> str:
    """Sentences, then the ops."""
    head = f"precision report: opt_level {facts.opt_level}, half is {facts.half or 'not used'}"
    lines = [head, *(f"  {sentence}" for sentence in facts.sentences)]
    rows = op_rows(facts)
    if rows:
        lines += ["", f"ops in {_traced(facts)}"]
        lines += [f"  {line}" for line in aligned([COLUMNS, *rows[:ROWS_OF_TEXT]], ruled=True)]
    if len(rows) > ROWS_OF_TEXT:
        lines.append(f"  and {len(rows) - ROWS_OF_TEXT} more: --report=FILE.html has all")
    return "\n".join(lines)


def op_rows(facts: Facts) -> list[list[str]]:
    """The cells of the table of ops."""
    return [[one.op, one.direction, one.dtype, str(one.count), _flops(one.flops)] for one in facts.ops]


def _traced(facts: Facts) -> str:
    """Of what the ops are."""
    if not facts.traced_steps:
        return "the script, of which no optimizer step was traced"
    return f"{counted(facts.traced_steps, 'traced step')}"


def _flops(flops: int) -> str:
    """With a metric prefix, as in "1.5 G"; "" for an op whose FLOPs are not counted."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= limit:
            return f"{flops / limit:.3g} {prefix}"
    return str(flops or "")


def as_page(facts: Facts, whole: bool = True) -> str:
    """The page with the data in it; or a part of another page, whose own looks it leaves alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch brings it along

    # Messages of errors, and arguments, are anybody's.
    loader = PackageLoader("ampcompat.tools.report", package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # the keys in their order
    return environment.get_template("page.html").render(
        facts=facts,
        data=plain(asdict(facts)),
        columns=COLUMNS,
        rows=op_rows(facts),
        traced=_traced(facts),
        chart=None if is_constant(facts.history) else chart(facts.history),
        width=WIDTH,
        height=HEIGHT,
        whole=whole,
    )


# -- the loss scale over the steps, on a log axis ----------------------------------------------------------------------
class Chart(NamedTuple):
    """The picture of the loss scale.

    Attributes:
        curves: The points of a line for each loss scaler, as SVG has them, by its name; "" where there is one.
        skipped: Where skipped steps are marked.
        scales: The labels of the axis of scales, each with its height.
        steps: The labels of the axis of steps, each with its distance from the left.
    """

    curves: dict[str, str]
    skipped: list[tuple[float, float]]
    scales: list[tuple[str, float]]
    steps: list[tuple[str, float]]


def chart(history: Sequence[Step]) -> Chart:
    """The picture of the scales, which are not all the same."""
    scales = [one.scale for step in history for one in step.scales]
    lowest, highest = min(scales), max(scales)
    first, last = history[0].step, history[-1].step

    def across(number: int) -> float:
        return round(WIDTH * (number - first) / max(last - first, 1), 1)

    def height(scale: float) -> float:
        return round(HEIGHT * math.log2(highest / scale) / math.log2(highest / lowest), 1)

    points: dict[int, list[str]] = {}
    for step in history:
        for one in step.scales:
            points.setdefault(one.loss_id, []).append(f"{across(step.step)},{height(one.scale)}")
    lost = [step for step in history if step.skipped and step.scales]
    return Chart(
        curves={f"loss {loss_id}" if len(points) > 1 else "": " ".join(points[loss_id]) for loss_id in sorted(points)},
        skipped=[(across(step.step), height(min(one.scale for one in step.scales))) for step in lost],
        scales=[(scale_text(scale), height(scale)) for scale in scale_labels(lowest, highest)],
        steps=[(str(number), across(number)) for number in sorted({first, (first + last) // 2, last})],
    )


def scale_labels(lowest: float, highest: float) -> list[float]:
    """The powers of two between two scales, or every second one, and so on; the two where there is but one."""
    top, bottom = math.floor(math.log2(highest)), math.ceil(math.log2(lowest))
    if top <= bottom:
        return [highest, lowest]
    stride = math.ceil((top - bottom + 1) / MOST_LABELS)
    return [2.0**exponent for exponent in range(top, bottom - 1, -stride)]
