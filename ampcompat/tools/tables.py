"""Tables of plain text: the one printer of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], ruled: bool = False, right: Collection[int] = ()) -> list[str]:
    """``rows`` as lines whose cells stand below each other.

    Args:
        rows: The cells.
        ruled: Put dashes below the first row, the head.
        right: Indices of the columns whose cells stand on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [["-" * width for width in widths]] if ruled else []
    lines = []
    for row in [*rows[:1], *rule, *rows[1:]]:
        padded = []
        for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padded.append(cell.rjust(width) if at in right else cell.ljust(width))
        lines.append("  ".join(padded).rstrip())
    return lines
