"""The page of op lists is what the lists say."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from ampcompat import _torch
from ampcompat.amp import lists
from ampcompat.amp.casts.rules import PYTHON, SHIPPED, Rule, rules_by_name

SCRIPT = Path(__file__).parents[3] / "docs" / "op_lists.py"


@pytest.fixture(scope="module")
def op_lists():
    spec = importlib.util.spec_from_file_location("op_lists", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_up_to_date(op_lists):
    assert SCRIPT.with_suffix(".md").read_text() == op_lists.page(), "run: python docs/op_lists.py"


def test_apex_is_said_to_cast_only_what_it_was_recorded_to_cast(op_lists):
    recorded = (Path(__file__).parents[2] / "parity" / "o1_op_dtypes.json").read_text()
    unseen = {name for name in op_lists.names(Rule.FLOAT) if not re.search(rf"\b{name}\b", recorded)}
    assert unseen - {"cpu"} == op_lists.SINCE_APEX
    (row,) = [line for line in op_lists.page().splitlines() if "`huber_loss`" in line]
    assert "| not listed |" in row


def test_no_name_ships_with_two_rules():
    modules = (lists.functional_overrides, lists.torch_overrides, lists.tensor_overrides)
    rules = {
        "half": {n for m in modules for n in m.FP16_FUNCS},
        "float": {n for m in modules for n in m.FP32_FUNCS},
        "widest": {n for m in modules[1:] for n in (*m.CASTS, *m.SEQUENCE_CASTS)},
        "banned": {name for name, _ in lists.functional_overrides.BANNED_FUNCS},
        "given": set(lists.UNCAST),
        "no bfloat16": set(lists.NO_BFLOAT16),
    }
    homes = Counter(name for names in rules.values() for name in names)
    assert [name for name, number in homes.items() if number > 1] == []
    assert set(_torch.ATEN) | set(PYTHON) <= set(SHIPPED)


def test_in_place_forms_follow_from_the_lists():
    table = rules_by_name()
    found = {rule: {n for n in table if n.endswith("_") and table[n] is rule} for rule in Rule}
    assert found[Rule.LEFT] == {"addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"}
    refused = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum renorm"
    assert found[Rule.INPLACE_BANNED] == {f"{name}_" for name in refused.split()}


@pytest.mark.parametrize(
    ("name", "device_type", "rule"),
    [
        ("torch.nn.functional.softmax", "cpu", "float32"),
        ("Tensor.pow_", "cuda", "refuses half"),
        ("lstm_cell", "cpu", "half"),
        ("torch.einsum", "cuda", "as native autocast"),
        ("matmul", "meta", "as given"),
    ],
)
def test_the_rule_in_force(op_lists, name, device_type, rule):
    assert op_lists.rule_for(name, device_type) == rule
