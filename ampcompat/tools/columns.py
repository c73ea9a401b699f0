"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], ruled: bool = False) -> list[str]:
    """``rows`` as lines whose cells stand below each other; ``ruled`` puts dashes below the first, their head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [["-" * width for width in widths]] if ruled else []
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [*rows[:1], *rule, *rows[1:]]
    ]
