"""Writes docs/divergences.md from docs/divergences.json: ``python docs/divergences.py``.

The same file drives the tests' expected failures (``@pytest.mark.divergence``).
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """<!-- Generated from divergences.json by divergences.py: change that file. -->
# Where ampcompat and apex differ

On purpose, each for the reason given; cite a row by its number. A row that names torch versions holds only there: its
test is expected to fail there, and fails the suite when it does not.
"""


def page() -> str:
    """The page as Markdown."""
    entries = json.loads((HERE / "divergences.json").read_text(encoding="utf-8"))
    parts = [HEAD]
    for area in dict.fromkeys(entry["area"] for entry in entries):
        parts.append(f"\n## {area[0].upper() + area[1:]}\n\n| | apex | ampcompat | because |\n|---|---|---|---|\n")
        for entry in entries:
            if entry["area"] == area:
                torch = f" (torch {entry['torch']})" if entry["torch"] else ""
                parts.append(
                    f"| {entry['number']} | {entry['apex']} | {entry['ampcompat']}{torch} | {entry['why']} |\n"
                )
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "divergences.md").write_text(page(), encoding="utf-8")
