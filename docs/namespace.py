"""Writes the table of extensions in docs/namespace.md, from their modules: ``python docs/namespace.py``.

It stands between ``<!-- begin extensions -->`` and ``<!-- end extensions -->``.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = Path(__file__).with_suffix(".md")
BEGIN: Final = "<!-- begin extensions -->"
END: Final = "<!-- end extensions -->"
#: What apex's extensions bound.
BOUND: Final = json.loads((ROOT / "tests" / "data" / "extensions.json").read_text(encoding="utf-8"))["modules"]


def supplied(module: str) -> list[str]:
    """The functions of an extension that ampcompat supplies, in apex's order; none of one that is no module here."""
    try:
        names = importlib.import_module(f"ampcompat.{module}").__all__
    except ModuleNotFoundError:
        return []
    return [name for name in BOUND[module] if name in names]


def _row(module: str) -> str:
    there = supplied(module)
    absent = [name for name in BOUND[module] if name not in there]
    cells = [", ".join(f"`{name}`" for name in names) for names in (there, absent)]
    return f"| `{module}` | {cells[0]} | {cells[1] if there else 'the module is not found'} |"


def table() -> str:
    """The extensions, and which of their functions there are."""
    return "\n".join(["| extension | supplied | not supplied |", "|---|---|---|", *map(_row, BOUND)])


def page() -> str:
    """The page with its table as it should be."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
