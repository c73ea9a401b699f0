"""Word a failed ``assert_opt_level_parity``: the first diverging step, and the losses around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampcompat.tools.parity.compare import Deviation, Tolerance
from ampcompat.tools.tables import aligned

BEFORE, AFTER = 2, 2


def failure(
    losses: Mapping[str, Sequence[float]],
    reference: str,
    results: Mapping[str, Deviation],
    tolerance: Tolerance,
    bases: Mapping[str, Sequence[float]],
    skipped: Mapping[str, Sequence[int]],
) -> str:
    """The message: a line per level that failed, and a table around the first step that any of them failed at.

    ``bases`` are the reference's losses that each level was compared with; ``skipped`` the steps that each skipped.
    """
    lines, places, notes = [], [], []
    for level, result in results.items():
        count, base = len(losses[level]), bases[level]
        if result.first_beyond is not None:
            at = result.first_beyond - 1
            places.append(at)
            lines.append(f"{level} leaves {reference} at step {at + 1}: loss {losses[level][at]:g}, not {base[at]:g}")
        elif count != len(base):
            places.append(min(count, len(base)))
            lines.append(f"{level} has {count} losses, {reference} has {len(base)}")
        if base is not losses[reference]:
            steps = ", ".join(map(str, skipped[level]))
            notes.append(f"{level} skipped {steps} for an overflow; {reference} was made to skip the same steps")
    allowed = f"|loss - reference| <= {tolerance.atol:g} + {tolerance.rtol:g} * |reference|"
    return "\n".join([*lines, *notes, f"tolerance: {allowed}", "", *_table(losses, reference, results, min(places))])


def _table(
    losses: Mapping[str, Sequence[float]], reference: str, results: Mapping[str, Deviation], place: int
) -> list[str]:
    names = [reference, *(level for level in results if level != reference)]
    rows = [["step", *(f"{name} (rel. dev.)" if name != reference else name for name in names)]]
    for at in range(max(0, place - BEFORE), min(place + AFTER + 1, max(len(losses[name]) for name in names))):
        cells = [f"{'>' if at == place else ' '} {at + 1}"]
        for name in names:
            cells.append(_cell(losses[name], results[name] if name != reference else None, at))
        rows.append(cells)
    return aligned(rows, right=range(len(rows[0])))


def _cell(losses: Sequence[float], result: Deviation | None, at: int) -> str:
    if at >= len(losses):
        return "-"
    deviation = result.by_step[at] if result and at < len(result.by_step) else None
    return f"{losses[at]:.6g}" if deviation is None else f"{losses[at]:.6g} ({deviation:.1e})"
