"""Writes the table of repositories into docs/parity.md from docs/repositories.json: ``python docs/repositories.py``."""

import json
from pathlib import Path

HERE = Path(__file__).parent
NEAR = 2e-3
BEGIN = "<!-- From repositories.json, by repositories.py: change that file. -->\n"
END = "<!-- End of what repositories.py writes. -->\n"


def runs() -> list[dict[str, str]]:
    """The runs, as in the data file."""
    found: list[dict[str, str]] = json.loads((HERE / "repositories.json").read_text(encoding="utf-8"))["runs"]
    return found


def difference(run: dict[str, str]) -> float | None:
    """The largest relative difference of the two figures; None where they are words."""
    try:
        pairs = list(zip(map(float, run["apex"].split()), map(float, run["ampcompat"].split()), strict=True))
    except ValueError:
        return None
    return max(abs(ours - apex) / abs(apex) for apex, ours in pairs)


def summary() -> str:
    """How many projects and runs, and how near their figures are."""
    every = [difference(run) for run in runs()]
    numbers = [number for number in every if number is not None]
    equal, near = sum(number == 0 for number in numbers), sum(0 < number < NEAR for number in numbers)
    far = len(numbers) - equal - near
    projects = len({run["repository"] for run in runs()})
    return (
        f"**{len(runs())} runs of {projects} projects.** Of {len(numbers)} that end with numbers, {equal} end"
        f" with\nthe same, {near} within {100 * NEAR} %, and {far} further apart, at O2.\n"
    )


def linked(run: dict[str, str]) -> str:
    """The repository, as a link to the commit where there is one; ``SHA~1`` is what the commit SHA changed."""
    address = f"https://github.com/{run['repository']}"
    if "commit" not in run:
        return f"[{run['repository']}]({address})"
    if run["commit"] == "pip":
        return f"{run['repository']} (PyPI)"
    if run["commit"].endswith("~1"):
        return f"[{run['repository']}]({address}/commit/{run['commit'].removesuffix('~1')}), before it"
    return f"[{run['repository']}]({address}/tree/{run['commit']})"


def table() -> str:
    """The summary, a row for each run, and how they were run."""
    how: str = json.loads((HERE / "repositories.json").read_text(encoding="utf-8"))["how"]
    lines = [
        "| repository, at the commit of the link | run | apex | ampcompat | difference |",
        "|---|---|---|---|---|",
    ]
    for run in runs():
        number = difference(run)
        apart = "" if number is None else "0" if number == 0 else f"{number:.1e}"
        remark = ": ".join(filter(None, [apart, run.get("note")]))
        shown = [linked(run), run["run"], run["apex"], run["ampcompat"], remark]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in shown) + "|")
    return summary() + "\n" + how + "\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as the data file has it."""
    text = (HERE / "parity.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    (HERE / "parity.md").write_text(page(), encoding="utf-8")
