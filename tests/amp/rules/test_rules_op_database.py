"""torch's own database of ops, under amp: nothing raises that plain autocast or eager code runs, but what is listed.

Forward and backward, as function, method, operator, in place and with ``out=``, on inputs of seven kinds.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from python_process import run_python

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).with_name("op_database.py")
PARTS = 8

_IN_PLACE = "acos asin cosh cumprod cumsum erfinv exp expm1 log log10 log2 pow reciprocal renorm rsqrt sinh tan"

#: Refused because a list of apex demands it: op, form and what the error says.
DEMANDED = {
    ("nn.functional.binary_cross_entropy", "function"): "binary_cross_entropy_with_logits",
    ("pow", "in-place operator"): "In-place pow_ on a",
    **{(name, "in place"): f"In-place {name}_ on a" for name in _IN_PLACE.split()},
    # Norms are float32, which a half ``out`` does not hold.
    ("linalg.norm", "out="): "expected out tensor dtype Float",
    ("linalg.norm.subgradients_at_zero", "out="): "expected out tensor dtype Float",
    ("linalg.matrix_norm", "out="): "expected out tensor dtype Float",
}

#: Calls that autocast refuses too, which eager code runs.
AUTOCAST_TOO = {
    # The call is pinv(a @ b): the product is half, and there is no pinv of half.
    ("linalg.pinv.singular", "function"): "expected a tensor with 2 or more dimensions of float",
    # Made of products, which are half: a float32 ``out`` does not fit them.
    ("tensordot", "out="): "dtype",
    ("linalg.matrix_power", "out="): "dtype",
    ("linalg.multi_dot", "out="): "dtype",
}


@pytest.fixture(scope="module")
def sweep():
    def run(level, part):
        done = run_python([PROGRAM, level, part, PARTS])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.skipif(find_spec("expecttest") is None, reason="torch's database of ops needs expecttest")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_nothing_raises_but_what_is_listed(level, part, sweep):
    result = sweep(level, part)
    assert len(result["ops"]) > 80
    for table, by_autocast_too in ((DEMANDED, False), (AUTOCAST_TOO, True)):
        listed = {(op, form) for op, form in table if op in result["ops"]}
        found = [
            (op, form, inputs, error) for op, form, inputs, error, too in result["found"] if too is by_autocast_too
        ]
        unlisted = [row for row in found if row[:2] not in listed]
        assert not unlisted
        assert {(op, form) for op, form, *_ in found} == listed, "listed, but not refused any more"
        for op, form, inputs, error in found:
            assert table[op, form] in error
            assert "half" in inputs or "float32" in inputs
