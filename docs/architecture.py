"""Writes the generated parts of docs/architecture.md: ``python docs/architecture.py [--measure]``.

They stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``: the picture of the modules, from their imports;
the tables of states, from the heads of the modules that implement them; and the figures of a step, from
tests/structure/figures.json. ``--measure`` records these anew.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "structure"))

from layers import LAYERS, LEGACY, SHARED, imports_by_module, without_implied  # noqa: E402

PAGE: Final = Path(__file__).with_suffix(".md")
FIGURES: Final = ROOT / "tests" / "structure" / "figures.json"
AMP: Final = ROOT / "ampcompat" / "amp"


class Table(NamedTuple):
    """A table at the head of a module: the module, and which of its tables, from 0."""

    path: Path
    number: int = 0


#: The tables that the page repeats, by the name of the part that does.
TABLES: Final = {
    "gradients": Table(AMP / "block.py"),
    "float32": Table(AMP / "block.py", 1),
    "masters": Table(AMP / "masters.py"),
    "casts": Table(AMP / "autocast.py"),
}


def table_in(table: Table) -> list[list[str]]:
    """The cells of ``table``, by row; the heads are row 0."""
    lines = (ast.get_docstring(ast.parse(table.path.read_text(encoding="utf-8"))) or "").splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("===")]
    first, second, last = rules[3 * table.number : 3 * table.number + 3]
    starts = [match.start() for match in re.finditer("=+", lines[first])]
    rows = [*lines[first + 1 : second], *lines[second + 1 : last]]
    ends = [*starts[1:], None]
    return [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in rows]


def markdown(rows: list[list[str]]) -> str:
    """``rows``, the first of which are heads, as a table."""
    head, *body = ["| " + " | ".join(row).replace("``", "`") + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


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
    found: dict[str, dict[str, int]] = {}
    environment, levels = {**os.environ, "PYTHONPATH": str(ROOT)}, ("O0", "O1", "O2")
    command = [sys.executable, str(ROOT / "tests" / "structure" / "call_path.py"), *levels]
    lines = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.splitlines()
    for level, line in zip(levels, lines, strict=True):
        measured = json.loads(line)
        found[f"{level} step"] = measured["step"]
        if level == "O2":
            found["O2 initialize"] = measured["initialize"]
    return found


def _figures_table() -> str:
    recorded: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    before, after = recorded["before"], recorded["after"]
    rows = [["", "calls", "functions", "files", "moves between files"]]
    for name in before:
        title = f"`initialize` at {name[:2]}" if name.endswith("initialize") else f"one step at {name[:2]}"
        rows.append([title, *(f"{before[name][unit]} → {after[name][unit]}" for unit in before[name])])
    return markdown(rows)


def page() -> str:
    """The page with its generated parts as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    parts = {name: markdown(table_in(table)) for name, table in TABLES.items()}
    parts |= {"picture": picture(), "figures": _figures_table()}
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    if "--measure" in sys.argv:
        recorded = {**json.loads(FIGURES.read_text(encoding="utf-8")), "after": figures()}
        text = json.dumps(recorded, indent=2)
        FIGURES.write_text(
            re.sub(r"\{\n {6}([^{}]*?)\n {4}\}", lambda m: "{" + re.sub(r"\n\s*", " ", m[1]) + "}", text) + "\n"
        )
    PAGE.write_text(page(), encoding="utf-8")
