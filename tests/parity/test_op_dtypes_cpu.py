"""Every recorded row on the CPU."""

import pytest
import torch
from o1_casts import casts_on
from op_calls import CALLS, PAIRS, probe
from op_rows import ROWS

pytestmark = pytest.mark.torch


def test_rows_and_calls_are_the_same_189():
    assert set(ROWS) == set(CALLS)
    assert len(ROWS) == 189


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_has_the_dtype_of_the_lists(name):
    with casts_on("cpu"):
        assert {pair: probe(name, pair) for pair in PAIRS} == ROWS[name]["expected"]


def test_casts_off_leave_every_row_as_torch_has_it():
    plain = {name: {pair: probe(name, pair) for pair in PAIRS} for name in ROWS}
    with casts_on("cpu"), torch.autocast("cpu", enabled=False):
        assert {name: {pair: probe(name, pair) for pair in PAIRS} for name in ROWS} == plain
