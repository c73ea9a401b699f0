"""The table of what ops are not finite at: each row is true, and the page has the same rows."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ampcompat.tools.explain import meanings

PAGE = Path(__file__).parents[3] / "docs" / "debugging.md"


def one(*numbers):
    return torch.tensor(numbers)


def gradient(function, at):
    x = one(at).requires_grad_()
    function(x).sum().backward()
    return x.grad.item()


NAN, INF = math.nan, math.inf
#: For each row, what is computed and what it gives.
TRUTHS = {
    "log": [
        (lambda: one(0.0).log(), -INF),
        (lambda: one(-1.0).log(), NAN),
        (lambda: gradient(torch.log, 0.0), INF),
    ],
    "sqrt, norm": [
        (lambda: gradient(torch.sqrt, 0.0), INF),
        (lambda: one(-1.0).sqrt(), NAN),
        (lambda: gradient(lambda x: (x * x).sum().sqrt(), 0.0), NAN),  # 0 * inf, further back
    ],
    "pow": [
        (lambda: one(0.0) ** -1.0, INF),
        (lambda: gradient(lambda x: x**0.5, 0.0), INF),
        (lambda: one(-1.0) ** 0.5, NAN),
    ],
    "div": [(lambda: one(1.0) / 0.0, INF), (lambda: one(0.0) / 0.0, NAN)],
    "mean": [(lambda: one().mean(), NAN)],
    "std": [(lambda: one(3.0).std(), NAN), (lambda: one(3.0).var(), NAN)],
    "exp": [(lambda: one(88.8).exp(), INF), (lambda: one(11.2).half().exp(), INF), (lambda: one(88.7).exp() < INF, 1)],
    "acos": [(lambda: gradient(torch.acos, 1.0), -INF), (lambda: one(1.1).acos(), NAN)],
    "cross_entropy": [(lambda: F.cross_entropy(torch.zeros(1, 2), torch.tensor([-100])), NAN)],
    "ctc_loss": [
        (
            lambda: F.ctc_loss(
                torch.zeros(1, 1, 3).log_softmax(-1), torch.ones(1, 2).long(), torch.tensor([1]), torch.tensor([2])
            ),
            INF,
        )
    ],
}


@pytest.mark.filterwarnings("ignore:(std|var)\\(\\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("row", meanings.OPS, ids=lambda row: row.name)
def test_a_row_is_true(row):
    for compute, expected in TRUTHS[row.name]:
        assert float(compute()) == pytest.approx(expected, nan_ok=True)


def test_an_op_has_one_row():
    ops = [op for row in meanings.OPS for op in row.ops]
    assert len(ops) == len(set(ops)) == len(meanings.BY_OP)


def rows_of_code():
    """All rows of the module, by name."""
    singles = [value for value in vars(meanings).values() if isinstance(value, meanings.Row)]
    return {row.name: row.means for row in (*singles, *meanings.OPS, *meanings.OUTSIDE.values())}


def test_the_page_has_the_same_rows():
    page = dict(re.findall(r'^\| "([^"]+)" \| ([^|]*?) \| ', PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert page == rows_of_code()
