"""Writes the generated parts of docs/architecture.md: ``python docs/architecture.py [--measure]``.

They stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``: the tables of states, from the heads of the rooms
that implement them, and the figures of a step, from tests/structure/figures.json. ``--measure`` records these anew.
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


def size() -> dict[str, int]:
    """Lines and files of ``ampcompat/amp``."""
    files = sorted(AMP.rglob("*.py"))
    return {"lines": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files), "files": len(files)}


def figures() -> dict[str, dict[str, int]]:
    """The figures of a step and of ``initialize``, measured now, each level in a process of its own."""
    found: dict[str, dict[str, int]] = {}
    environment, levels = {**os.environ, "PYTHONPATH": str(ROOT)}, ("O0", "O1", "O2")
    walk = [sys.executable, str(ROOT / "tests" / "structure" / "walk.py"), *levels]
    lines = subprocess.run(walk, env=environment, capture_output=True, check=True).stdout.splitlines()
    for level, ways in zip(levels, map(json.loads, lines), strict=True):
        found |= {f"{level} {way}": ways[way] for way in ("step", *["initialize"] * (level == "O2"))}
    return {**found, "amp": size()}


def _figures_table() -> str:
    recorded: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    before, after = recorded["before"], recorded["after"]
    rows = [["", "calls", "functions", "files", "moves between files"]]
    for name in (name for name in before if name != "amp"):
        title = f"`initialize` at {name[:2]}" if name.endswith("initialize") else f"one step at {name[:2]}"
        rows.append([title, *(f"{before[name][unit]} → {after[name][unit]}" for unit in before[name])])
    lines, files = (f"{before['amp'][unit]:,} → {after['amp'][unit]:,}" for unit in ("lines", "files"))
    return f"{markdown(rows)}\n\n`ampcompat/amp`: {lines} lines, {files} files."


def page() -> str:
    """The page with its generated parts as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    parts = {name: markdown(table_in(table)) for name, table in TABLES.items()} | {"figures": _figures_table()}
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
