"""A precision report as text and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from ampcompat.tools.data import plain
from ampcompat.tools.recording.steps import Step
from ampcompat.tools.report.facts import Facts
from ampcompat.tools.tables import aligned

#: Rows of the table of ops that the text shows; page and JSON have all.
ROWS_OF_TEXT = 30
#: The size of the picture of the loss scale.
WIDTH, HEIGHT = 700, 160
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
    return f"{facts.traced_steps} traced step{'s' if facts.traced_steps > 1 else ''}"


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
        curves=scale_curves(facts.history),
        skipped=_skipped(facts.history),
        limits=_limits(facts.history),
        width=WIDTH,
        height=HEIGHT,
        whole=whole,
    )


# -- the loss scale over the steps, on a log axis ----------------------------------------------------------------------
def scale_curves(history: Sequence[Step]) -> list[str]:
    """The points of a line for each loss scaler, as SVG has them."""
    points: dict[int, list[str]] = {}
    for step in history:
        for one in step.scales:
            x, y = _place(history, step.step, one.scale)
            points.setdefault(one.loss_id, []).append(f"{x:.1f},{y:.1f}")
    return [" ".join(points[loss_id]) for loss_id in sorted(points)]


def _skipped(history: Sequence[Step]) -> list[tuple[float, float]]:
    """Where skipped steps are marked."""
    marked = [(step.step, min(one.scale for one in step.scales)) for step in history if step.skipped and step.scales]
    return [_place(history, number, scale) for number, scale in marked]


def _limits(history: Sequence[Step]) -> tuple[float, float]:
    """The lowest and the highest scale."""
    scales = [one.scale for step in history for one in step.scales] or [1.0]
    return min(scales), max(scales)


def _place(history: Sequence[Step], number: int, scale: float) -> tuple[float, float]:
    lowest, highest = _limits(history)
    across = (number - history[0].step) / max(history[-1].step - history[0].step, 1)
    span = math.log2(highest / lowest) or 1.0
    return across * WIDTH, HEIGHT * (1 - math.log2(scale / lowest) / span)
