"""Writes the generated parts of docs/architecture.md: ``python docs/architecture.py [--measure]``.

They stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``: the picture of the modules, from their imports;
the table of changes, from tests/state_tables.py; and the figures of a step, from tests/structure/figures.json.
``--measure`` records these anew. The other tables of tests/state_tables.py are written into docstrings.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "structure")]

from layers import LAYERS, LEGACY, SHARED, imports_by_module, without_implied  # noqa: E402
from state_tables import SHOWN_IN, TABLES, Table  # noqa: E402

PAGE: Final = Path(__file__).with_suffix(".md")
FIGURES: Final = ROOT / "tests" / "structure" / "figures.json"
AMP: Final = ROOT / "ampcompat" / "amp"


def docstring_table(table: Table) -> list[str]:
    """``table`` in reStructuredText, by line."""
    rows = [[cell.replace("`", "``") for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [rule, lines[0], rule, *lines[1:], rule]


def with_docstring_tables(source: str, tables: list[Table]) -> str:
    """``source`` with the tables of its docstring, in their order, as they should be."""
    lines = source.splitlines()
    for number, table in enumerate(tables):
        # A table has three rules: above its heads, below them, and at its end.
        rules = [index for index, line in enumerate(lines) if re.fullmatch("[= ]*===[= ]*", line)]
        first, _, last = rules[3 * number : 3 * number + 3]
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


def figures() -> dict[str, dict[str, int]]:
    """The figures of a step and of ``initialize``, measured now, each level in a process of its own."""
    measured_by_path: dict[str, dict[str, int]] = {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    levels = ("O0", "O1", "O2")
    command = [sys.executable, str(ROOT / "tests" / "structure" / "call_path.py"), *levels]
    lines = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.splitlines()
    for level, line in zip(levels, lines, strict=True):
        measured = json.loads(line)
        measured_by_path[f"{level} step"] = measured["step"]
        if level == "O2":
            measured_by_path["O2 initialize"] = measured["initialize"]
    return measured_by_path


def _figures_table() -> str:
    recorded: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    rows = [["", "calls", "functions", "files", "moves between files"]]
    for name, figures_of_path in recorded["after"].items():
        title = f"`initialize` at {name[:2]}" if name.endswith("initialize") else f"one step at {name[:2]}"
        rows.append([title, *map(str, figures_of_path.values())])
    return markdown(rows)


def page() -> str:
    """The page with its generated parts as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    changes = TABLES["changes"]
    parts = {
        "picture": picture(),
        "changes": markdown([changes.head, *changes.rows]),
        "figures": _figures_table(),
    }
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def record_figures() -> None:
    """Measure a step and ``initialize``, and write the figures, each path on a line."""
    recorded = {**json.loads(FIGURES.read_text(encoding="utf-8")), "after": figures()}
    text = json.dumps(recorded, indent=2)
    innermost = r"\{\n {6}([^{}]*?)\n {4}\}"
    text = re.sub(innermost, lambda match: "{" + re.sub(r"\n\s*", " ", match[1]) + "}", text)
    FIGURES.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv:
        record_figures()
    PAGE.write_text(page(), encoding="utf-8")
    for path, source in modules_with_tables().items():
        path.write_text(source, encoding="utf-8")
