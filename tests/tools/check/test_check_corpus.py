"""What is found in a labelled corpus, at which level, and what the docs say of it."""

from pathlib import Path

import pytest
from trap_corpus import FALSE, MISSED, SUSPECTED, TRUE, WARNED

from ampcompat.tools.check import scan_source
from ampcompat.tools.check.traps import TRAPS

DOC = Path(__file__).parents[3] / "docs" / "check_and_migrate.md"
CODES = {**{name: code for name, (_, code) in TRUE.items()}, **FALSE}


def expected(name):
    if name in TRUE:
        trap, _ = TRUE[name]
        return [] if name in MISSED else [(trap, "warning" if name in WARNED else "error")]
    return [(SUSPECTED[name], "warning")] if name in SUSPECTED else []


@pytest.mark.parametrize("name", CODES)
def test_what_is_found_and_at_which_level(name):
    assert [(f.name, f.level) for f in scan_source(CODES[name]) if f.kind != "symbol"] == expected(name)


def test_every_trap_is_in_the_corpus():
    assert not TRUE.keys() & FALSE.keys()
    assert {trap for trap, _ in TRUE.values()} == {trap.__name__ for trap in TRAPS}


def test_the_docs_say_what_is_measured():
    found = len(TRUE) - len(MISSED)
    numbers = {
        "snippets": len(CODES),
        "with a trap": len(TRUE),
        "precision at error level": 1.0,
        "precision at any level": round(found / (found + len(SUSPECTED)), 2),
        "recall": round(found / len(TRUE), 2),
    }
    head, values = (" | ".join(map(str, cells)) for cells in (numbers, numbers.values()))
    assert f"| {head} |\n|---|---|---|---|---|\n| {values} |\n" in DOC.read_text(encoding="utf-8")
