"""Writes docs/divergences.md from docs/divergences.json: ``python docs/divergences.py``.

The same file drives the tests' expected failures (``@pytest.mark.divergence``).
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """<!-- Generated from divergences.json by divergences.py: change that file. -->
# Differences from apex

Differences of `amp` from apex, numbered so that you can cite them; [Names](namespace.md) has those of single
optimizers, norms, extensions and `FP16_Optimizer`. A row that names torch versions holds only there.
"""


def page() -> str:
    """The page as Markdown."""
    entries = json.loads((HERE / "divergences.json").read_text(encoding="utf-8"))
    parts = [HEAD]
    for area in dict.fromkeys(entry["area"] for entry in entries):
        title = f"`{area}`" if "." in area or "_" in area else area.capitalize()
        parts.append(f"\n## {title}\n\n| | apex | ampcompat | reason |\n|---|---|---|---|\n")
        for entry in entries:
            if entry["area"] == area:
                torch = f" (torch {entry['torch']})" if entry["torch"] else ""
                parts.append(
                    f"| {entry['number']} | {entry['apex']} | {entry['ampcompat']}{torch} | {entry['why']} |\n"
                )
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "divergences.md").write_text(page(), encoding="utf-8")
