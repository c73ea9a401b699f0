"""Each rule finds its mistakes and leaves its look-alikes alone."""

import pytest
from rule_examples import FALSE, TRUE, trained

from ampcompat.tools.check import scan_source
from ampcompat.tools.check.rules import RULES


def traps(code):
    found = scan_source(code)
    assert not [finding for finding in found if finding.kind == "file"], found
    return [(finding.name, finding.level) for finding in found if finding.kind == "trap"]


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in TRUE for name in TRUE[rule]])
def test_a_mistake(rule, name):
    code, level = TRUE[rule][name]
    assert traps(code) == [(rule, level)]


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in FALSE for name in FALSE[rule]])
def test_a_look_alike(rule, name):
    assert traps(FALSE[rule][name]) == []


def test_every_rule_has_both():
    names = [rule.find.__name__ for rule in RULES]
    assert list(TRUE) == names
    assert list(FALSE) == names


def test_without_amp_nothing_is_a_mistake():
    assert scan_source("import torch\ny = torch.bmm(a, b).masked_fill(m, -1e9)\nloss.backward()\n") == []


def test_mistakes_are_seen_in_migrated_scripts_too():
    code = TRUE["clip_of_scaled_gradients"]["in the block"][0]
    for start in ("from ampcompat import amp", "import native_amp as amp"):
        assert traps(code.replace("from apex import amp", start)) == [("clip_of_scaled_gradients", "error")]


def test_another_function_under_the_name_of_a_clip_is_none():
    found = trained('"O1"', inside="clip(model.parameters(), 1.0)\n", before="from lib import find as clip\n")
    assert traps(found) == []
