"""The comparison as a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ampcompat.parity.compare import Result, Tolerance
from ampcompat.parity.record import Run

HEADER = ("level", "steps", "max dev", "mean dev", "first beyond", "skipped", "s/step", "peak MiB", "verdict")


def table(results: Sequence[Result], tolerance: Tolerance) -> str:
    """One line per level, and one that says what the columns mean."""
    rows = [HEADER, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [_line(rows[0], widths), "  ".join("-" * width for width in widths)]
    lines += [_line(row, widths) for row in rows[1:]]
    allowed = f"{tolerance.rtol:g} x |O0's|" + (f" + {tolerance.atol:g}" if tolerance.atol else "")
    return "\n".join([*lines, "", f"dev: |loss - O0's| / |O0's|; beyond: |loss - O0's| > {allowed}; s/step: median"])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
    return "  ".join(cells).rstrip()


def _row(result: Result) -> tuple[str, ...]:
    run, deviation = result.run, result.deviation
    memory = peak_memory(run)
    return (
        run.level.name,
        str(len(run.steps)),
        number(deviation.largest if deviation else None, ".2e"),
        number(deviation.mean if deviation else None, ".2e"),
        str((deviation.first_beyond if deviation else None) or "-"),
        str(skipped(run)),
        number(seconds_per_step(run), ".3g"),
        number(None if memory is None else memory / 2**20, ".0f"),
        ("" if result.passed else "FAIL: ") + result.verdict,
    )


def number(value: float | None, form: str) -> str:
    """``value`` in ``form``, ``-`` for None."""
    return "-" if value is None else format(value, form)


def skipped(run: Run) -> int:
    """Steps that an overflow cost."""
    return sum(step.skipped for step in run.steps)


def seconds_per_step(run: Run) -> float | None:
    """Median over the steps, the first left out: it pays for what happens once."""
    known = [step.seconds for step in run.steps if step.seconds is not None]
    return median(known) if known else None


def peak_memory(run: Run) -> int | None:
    """The largest memory of the run in bytes."""
    return max((step.memory for step in run.steps if step.memory is not None), default=None)
