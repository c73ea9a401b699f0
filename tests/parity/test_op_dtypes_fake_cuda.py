"""The rules for CUDA on fake CUDA tensors, which need no device. What they cannot run is in tests/gpu."""

import pytest
from o1_casts import casts_on
from op_calls import PAIRS, probe
from op_rows import NOT_FAKE, ROWS
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.torch


def test_the_exceptions_are_recorded_rows():
    assert set(ROWS) > NOT_FAKE


@pytest.mark.parametrize("name", sorted(set(ROWS) - NOT_FAKE))
def test_every_row_has_the_dtype_of_the_lists_on_cuda(name):
    with casts_on("cuda"), FakeTensorMode():
        assert {pair: probe(name, pair, "cuda:0") for pair in PAIRS} == ROWS[name]["expected"]
