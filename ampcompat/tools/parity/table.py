"""The comparison as plain text: a table of the levels, and the losses around the first step that is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampcompat.tools.parity.compare import Result, Tolerance
from ampcompat.tools.tables import aligned
from ampcompat.tools.words import counted

HEADER = ("level", "steps", "max dev", "mean dev", "first beyond", "skipped", "verdict")


#: Numbers of skipped steps that are written out, and steps that are shown before and after one that is off.
WRITTEN_OUT, AROUND = 8, 2


def table(
    results: Sequence[Result], tolerance: Tolerance, paint: Callable[[str, str], str] = lambda text, colour: text
) -> str:
    """One line a level, one on what the columns mean, one for each level that skipped steps, and losses that are off.

    ``paint(text, colour)`` gives verdicts their colour.
    """
    head, rule, *rows = aligned([HEADER, *map(_row, results)], ruled=True, right=range(1, len(HEADER) - 1))
    lines = [head, rule]
    for line, result in zip(rows, results, strict=True):
        colour = "red" if not result.passed else "" if result.deviation is None else "green"
        if colour and result.judged:
            line = line.removesuffix(_verdict(result)) + paint(_verdict(result), colour)
        lines.append(line)
    reference = results[0].run.level.opt_level
    allowed = f"{tolerance.rtol:g} x |{reference}'s|" + (f" + {tolerance.atol:g}" if tolerance.atol else "")
    apart = f"|loss - {reference}'s|"
    lines += ["", f"dev: {apart} / |{reference}'s|; beyond: {apart} > {allowed}"]
    lines += [note for result in results[1:] if (note := skip_note(result, reference))]
    not_repeatable = [result.not_repeatable for result in results if result.not_repeatable]
    if not_repeatable:
        return "\n".join([*lines, "", not_repeatable[0]])
    off = around(results)
    return "\n".join([*lines, *(["", *off] if off else [])])


def skip_note(result: Result, reference: str) -> str:
    """Which steps a level skipped, and what that means for its deviation; "" where it skipped none."""
    numbers = result.run.skipped_steps
    if not numbers:
        return ""
    more = f" and {len(numbers) - WRITTEN_OUT} more" if len(numbers) > WRITTEN_OUT else ""
    which = f"{'steps' if len(numbers) > 1 else 'step'} {', '.join(map(str, numbers[:WRITTEN_OUT]))}{more}"
    what = f"{result.run.level.name} skipped {which} for an overflow"
    if result.run.reference is not None:
        return f"{what}; it is compared with a run of {reference} that skipped the same"
    behind = f"{counted(len(numbers), 'update')} behind {reference}"
    return f"{what}: its weights are then {behind}"


def _row(result: Result) -> tuple[str, ...]:
    run, deviation = result.run, result.deviation
    return (
        run.level.name,
        str(len(run.steps)),
        number(deviation.largest if deviation else None, ".2e"),
        number(deviation.mean if deviation else None, ".2e"),
        str((deviation.first_beyond if deviation else None) or "-"),
        str(len(run.skipped_steps)),
        _verdict(result),
    )


def _verdict(result: Result) -> str:
    if not result.judged:
        return f"not judged: {result.verdict}"
    return result.verdict if result.passed or result.not_repeatable else f"FAIL: {result.verdict}"


def number(value: float | None, form: str) -> str:
    """``value`` in ``form``, ``-`` for None."""
    return "-" if value is None else format(value, form)


def around(results: Sequence[Result]) -> list[str]:
    """The losses of all levels around the first step at which one fails; nothing where none does at a step."""
    places = [place for result in results if (place := _first_off(result)) is not None]
    if not places:
        return []
    place = min(places)
    last = max(len(result.run.losses) for result in results)
    rows = [["step", *(_heading(result) for result in results)]]
    for at in range(max(0, place - AROUND), min(place + AROUND + 1, last)):
        cells = [_loss(result, at) for result in results]
        rows.append([f"{'>' if at == place else ' '} {at + 1}", *cells])
    return aligned(rows, right=range(len(rows[0])))


def _first_off(result: Result) -> int | None:
    """The index of the step at which ``result`` fails, if it does for its losses."""
    if result.passed or result.deviation is None:
        return None
    if result.deviation.first_beyond is not None:
        return result.deviation.first_beyond - 1
    count = len(result.run.losses)
    return None if count == len(result.compared_with) else min(count, len(result.compared_with))


def _heading(result: Result) -> str:
    name = result.run.level.name
    return name if result.deviation is None else f"{name} (rel. dev.)"


def _loss(result: Result, at: int) -> str:
    losses = result.run.losses
    loss = losses[at] if at < len(losses) else None
    if loss is None:
        return "-"
    known = [] if result.deviation is None else result.deviation.by_step
    deviation = known[at] if at < len(known) else None
    return f"{loss:.6g}" if deviation is None else f"{loss:.6g} ({deviation:.1e})"
