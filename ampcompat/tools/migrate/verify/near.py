"""What was rewritten near a place of the migrated script."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ampcompat.tools.migrate.change import Change

HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def rewritten_near(changes: Iterable[Change], place: str) -> list[str]:
    """The lines of the diff that are next to ``train.py:12``, a line of the migrated file."""
    name, _, line = place.rpartition(":")
    for change in changes:
        if change.name == name and change.changed:
            return _nearest_hunk(change.diff(), int(line))
    return []


def _nearest_hunk(diff: str, line: int) -> list[str]:
    best: list[str] = []
    distance = None
    starts = list(HUNK.finditer(diff))
    for number, start in enumerate(starts):
        first = int(start[1])
        last = first + int(start[2] or 1) - 1
        away = max(first - line, line - last, 0)
        if distance is None or away < distance:
            end = starts[number + 1].start() if number + 1 < len(starts) else len(diff)
            best = diff[start.start() : end].splitlines()
            distance = away
    return best
