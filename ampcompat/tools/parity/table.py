"""The comparison as plain text: a table of the levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampcompat.tools.parity.compare import Result, Tolerance
from ampcompat.tools.tables import aligned

HEADER = ("level", "steps", "max dev", "skipped", "verdict")


def table(
    results: Sequence[Result], tolerance: Tolerance, paint: Callable[[str, str], str] = lambda text, colour: text
) -> str:
    """One line a level, one on what the columns mean, and one for each level with a reference of its own.

    ``paint(text, colour)`` gives verdicts their colour.
    """
    head, rule, *rows = aligned([HEADER, *map(_row, results)], ruled=True, right=range(1, len(HEADER) - 1))
    lines = [head, rule]
    for line, result in zip(rows, results, strict=True):
        colour = "red" if not result.passed else "" if result.deviation is None else "green"
        if colour:
            line = line.removesuffix(_verdict(result)) + paint(_verdict(result), colour)
        lines.append(line)
    reference = results[0].run.level.opt_level
    allowed = f"{tolerance.rtol:g} x |{reference}'s|" + (f" + {tolerance.atol:g}" if tolerance.atol else "")
    apart = f"|loss - {reference}'s|"
    lines += ["", f"dev: {apart} / |{reference}'s|; within tolerance: {apart} <= {allowed}"]
    for result in results[1:]:
        if result.run.reference is not None:
            lines.append(f"{result.run.level.name} is compared with a run of {reference} that skipped the same steps")
    not_repeatable = [result.not_repeatable for result in results if result.not_repeatable]
    return "\n".join([*lines, *(["", not_repeatable[0]] if not_repeatable else [])])


def _row(result: Result) -> tuple[str, ...]:
    run, deviation = result.run, result.deviation
    largest = None if deviation is None else deviation.largest
    return (
        run.level.name,
        str(len(run.steps)),
        "-" if largest is None else f"{largest:.2e}",
        str(len(run.skipped_steps)),
        _verdict(result),
    )


def _verdict(result: Result) -> str:
    return result.verdict if result.passed or result.not_repeatable else f"FAIL: {result.verdict}"
