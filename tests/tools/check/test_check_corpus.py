"""What is found in a labelled corpus, and at which level."""

import pytest
from trap_corpus import FALSE, TRUE, WARNED

from ampcompat.tools.check import scan_source
from ampcompat.tools.check.traps import TRAPS


def traps(code):
    return [(f.name, f.level) for f in scan_source(code) if f.kind != "symbol"]


@pytest.mark.parametrize("name", TRUE)
def test_a_snippet_with_a_trap(name):
    trap, code = TRUE[name]
    level = "warning" if name in WARNED else "error"
    assert traps(code) == [(trap, level)]


@pytest.mark.parametrize("name", FALSE)
def test_a_look_alike(name):
    assert traps(FALSE[name]) == []


def test_every_trap_is_in_the_corpus():
    assert {trap for trap, _ in TRUE.values()} == {trap.__name__ for trap in TRAPS}
