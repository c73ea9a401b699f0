"""The comparison as a table of plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampcompat.tools.parity.compare import Result, Tolerance
from ampcompat.tools.tables import aligned

HEADER = ("level", "steps", "max dev", "mean dev", "first beyond", "skipped", "s/step", "peak MiB", "verdict")


#: Numbers of skipped steps that are written out.
WRITTEN_OUT = 8


def table(
    results: Sequence[Result], tolerance: Tolerance, paint: Callable[[str, str], str] = lambda text, colour: text
) -> str:
    """One line per level, one that says what the columns mean, and one per level that skipped steps.

    ``paint(text, colour)`` gives verdicts their colour.
    """
    head, rule, *rows = aligned([HEADER, *map(_row, results)], ruled=True, right=range(1, len(HEADER) - 1))
    lines = [head, rule]
    for line, result in zip(rows, results, strict=True):
        colour = "red" if not result.passed else "" if result.deviation is None else "green"
        if colour and result.judged:
            line = line.removesuffix(_verdict(result)) + paint(_verdict(result), colour)
        lines.append(line)
    allowed = f"{tolerance.rtol:g} x |O0's|" + (f" + {tolerance.atol:g}" if tolerance.atol else "")
    lines += ["", f"dev: |loss - O0's| / |O0's|; beyond: |loss - O0's| > {allowed}; s/step: median"]
    return "\n".join([*lines, *(note for result in results[1:] if (note := skip_note(result)))])


def skip_note(result: Result) -> str:
    """Which steps a level skipped, and what that means for its deviation; "" where it skipped none."""
    numbers = result.run.skipped_steps
    if not numbers:
        return ""
    more = f" and {len(numbers) - WRITTEN_OUT} more" if len(numbers) > WRITTEN_OUT else ""
    which = f"{'steps' if len(numbers) > 1 else 'step'} {', '.join(map(str, numbers[:WRITTEN_OUT]))}{more}"
    what = f"{result.run.level.name} skipped {which} for an overflow"
    if result.run.reference is not None:
        return f"{what}; it is compared with a run of O0 that skipped the same"
    behind = f"{len(numbers)} update{'s' if len(numbers) > 1 else ''} behind O0"
    return f"{what}: its weights are then {behind}"


def _row(result: Result) -> tuple[str, ...]:
    run, deviation = result.run, result.deviation
    memory = run.peak_memory
    return (
        run.level.name,
        str(len(run.steps)),
        number(deviation.largest if deviation else None, ".2e"),
        number(deviation.mean if deviation else None, ".2e"),
        str((deviation.first_beyond if deviation else None) or "-"),
        str(len(run.skipped_steps)),
        number(run.seconds_per_step, ".3g"),
        number(None if memory is None else memory / 2**20, ".0f"),
        _verdict(result),
    )


def _verdict(result: Result) -> str:
    if not result.judged:
        return f"not judged: {result.verdict}"
    return result.verdict if result.passed else f"FAIL: {result.verdict}"


def number(value: float | None, form: str) -> str:
    """``value`` in ``form``, ``-`` for None."""
    return "-" if value is None else format(value, form)
