"""Writes the generated parts of docs/architecture.md: ``python docs/architecture.py``.

They stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``: the picture of the modules, from their imports,
and the table of changes, from tests/state_tables.py. Its other tables are written into docstrings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "structure")]

from layers import LAYERS, LEGACY, SHARED, imports_by_module, without_implied  # noqa: E402
from state_tables import SHOWN_IN, TABLES, Table  # noqa: E402

PAGE: Final = Path(__file__).with_suffix(".md")
AMP: Final = ROOT / "ampcompat" / "amp"


def docstring_table(table: Table) -> list[str]:
    """``table`` in reStructuredText, by line."""
    rows = [[cell.replace("`", "``") for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [rule, lines[0], rule, *lines[1:], rule]


def with_docstring_tables(source: str, tables: list[Table]) -> str:
    """``source`` with those tables of its docstring that have the heads of ``tables`` as they should be."""
    lines = source.splitlines()
    for table in tables:
        # A table has three rules: above its heads, below them, and at its end.
        rules = [index for index, line in enumerate(lines) if re.fullmatch("[= ]*===[= ]*", line)]
        for first, last in zip(rules[::3], rules[2::3], strict=True):
            if tuple(re.split(" {2,}", lines[first + 1])) == table.head:
                lines[first : last + 1] = docstring_table(table)
    return "\n".join(lines) + "\n"


def modules_with_tables() -> dict[Path, str]:
    """Each module that shows tables in its docstring, and its source as it should be."""
    written = {}
    for module, names in SHOWN_IN.items():
        path = AMP / f"{module}.py"
        tables = [TABLES[name] for name in names]
        written[path] = with_docstring_tables(path.read_text(encoding="utf-8"), tables)
    return written


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """``rows``, the first of which are heads, as a table."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    columns = head.count(" | ") + 1
    return "\n".join([head, "|---" * columns + "|", *body])


def picture() -> str:
    """The modules of ``ampcompat/amp`` as a Mermaid graph: an arrow from each to those it imports.

    Arrows that others imply are left out, and so are modules that hold names alone or that every module may import.
    """
    left_out = SHARED | LEGACY
    graph = {name: targets - left_out for name, targets in imports_by_module().items() if name not in left_out}
    arrows = without_implied(graph)
    lines = ["```mermaid", "flowchart TD"]
    for layer in reversed(LAYERS):
        for name in layer:
            lines += [f"    {name} --> {target}" for target in sorted(arrows.get(name, ()))]
    return "\n".join([*lines, "```"])


def page() -> str:
    """The page with its generated parts as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    changes = TABLES["changes"]
    parts = {
        "picture": picture(),
        "changes": markdown([changes.head, *changes.rows]),
    }
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for path, source in modules_with_tables().items():
        path.write_text(source, encoding="utf-8")
