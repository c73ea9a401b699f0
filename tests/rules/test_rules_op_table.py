"""The page of op lists is what the lists say."""

from pathlib import Path

import pytest

from ampcompat.amp import lists, op_table
from ampcompat.amp.overloads import ATEN, RULES

PAGE = Path(__file__).parents[2] / "docs" / "op_lists.md"


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text() == op_table.page(), "run: python -m ampcompat.amp.op_table > docs/op_lists.md"


def test_no_name_is_on_two_lists():
    names = [
        *(*lists.HALF, *lists.FLOAT, *lists.PROMOTE, *lists.SEQUENCE_PROMOTE),
        *(*lists.BANNED, *lists.INPLACE_BANNED, *lists.UNCAST),
    ]
    assert len(names) == len(set(names))
    assert set(names) <= set(RULES)
    assert set(ATEN) <= set(names)


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
def test_the_rule_in_force(name, device_type, rule):
    assert op_table.rule_for(name, device_type) == rule
