"""``tests/README.md`` names what there is: a newcomer who follows it finds the file."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = (TESTS / "README.md").read_text("utf-8")


def test_the_files_that_it_names_are_there():
    names = set(re.findall(r"`((?:\w+/)*\w+\.py)`", README))
    assert len(names) > 20
    assert [name for name in sorted(names) if not any(TESTS.rglob(name))] == []


def test_the_modules_that_it_names_are_those_of_the_core():
    table = README.split("## By module")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(rows))) - {"half", "casts", "adapters"}
    core = TESTS.parent / "ampcompat" / "amp"
    modules = {path.stem for path in core.rglob("*.py")} | {"lists"}
    assert named - modules == set()
