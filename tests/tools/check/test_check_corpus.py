"""Precision and recall of the traps over a labelled corpus, and what the docs say of them."""

import ast
from pathlib import Path

import pytest
from trap_corpus import FALSE, TRUE

from ampcompat.tools.check import scan_source
from ampcompat.tools.check.traps import TRAPS

DOC = Path(__file__).parents[3] / "docs" / "check_and_migrate.md"
LABELS = {**{name: traps for name, (traps, _) in TRUE.items()}, **{name: set() for name in FALSE}}
CODES = {**{name: code for name, (_, code) in TRUE.items()}, **FALSE}


def found(name):
    return {(f.name, f.level) for f in scan_source(CODES[name]) if f.kind == "trap"}


def measured():
    """Counts over the corpus: at error level, at any level, and what is missed."""
    right = {"error": 0, "any": 0}
    wrong = {"error": 0, "any": 0}
    missed = []
    for name, labels in LABELS.items():
        shown = found(name)
        for trap, level in shown:
            for kind in ("error", "any") if level == "error" else ("any",):
                (right if trap in labels else wrong)[kind] += 1
        missed += [(name, trap) for trap in labels if trap not in {t for t, _ in shown}]
    labelled = sum(map(len, LABELS.values()))
    return {
        "snippets": len(LABELS),
        "with a trap": len(TRUE),
        "precision at error level": round(right["error"] / (right["error"] + wrong["error"]), 2),
        "precision at any level": round(right["any"] / (right["any"] + wrong["any"]), 2),
        "recall": round((labelled - len(missed)) / labelled, 2),
    }, missed


def test_the_corpus_is_whole():
    assert len(LABELS) >= 60
    assert set(TRUE) & set(FALSE) == set()
    assert {trap for labels in LABELS.values() for trap in labels} == {trap.__name__ for trap in TRAPS}
    for code in CODES.values():
        ast.parse(code)


@pytest.mark.parametrize("name", FALSE)
def test_look_alikes_raise_no_error(name):
    assert {trap for trap, level in found(name) if level == "error"} == set()


def test_precision_and_recall():
    numbers, missed = measured()
    assert numbers["precision at error level"] == 1.0
    assert numbers["recall"] >= 0.9, missed
    assert len(missed) == 2, missed


def test_the_docs_say_what_is_measured():
    numbers, _ = measured()
    head, values = (" | ".join(map(str, cells)) for cells in (numbers, numbers.values()))
    assert f"| {head} |\n|---|---|---|---|---|\n| {values} |\n" in DOC.read_text(encoding="utf-8")
