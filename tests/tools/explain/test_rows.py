"""Rows of a batch: which are not finite, and whether these are of other data."""

import pytest
import torch

from ampcompat.tools.explain.rows import far_rows, lost_rows

BATCH = torch.ones(6, 3)
OUTLIER = BATCH.clone()
OUTLIER[4, 1] = -3e4
LOST = BATCH.clone()
LOST[4] = torch.inf


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], ""),
        ([2], ", in row 2"),
        ([0, 3], ", in rows 0, 3"),
        (range(11), ", in rows 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"),
        (range(12), ""),
    ],
)
def test_rows_that_are_lost(rows, text):
    tensor = torch.ones(12, 2)
    tensor[list(rows)] = torch.nan
    assert lost_rows(tensor) == text


@pytest.mark.parametrize(
    ("out", "given", "inputs", "text"),
    [
        (LOST, OUTLIER, OUTLIER, "row 4 of input 0, up to 3e+04, the usual one 1"),
        (LOST, OUTLIER.half(), OUTLIER, "row 4 of input 0, up to 3e+04, the usual one 1"),
        (LOST, BATCH, OUTLIER, ""),  # as the degree of a node, by which a sum is only divided
        (LOST, OUTLIER, BATCH, ""),
        (LOST, LOST, OUTLIER, ""),  # written in place
        (BATCH, OUTLIER, OUTLIER, ""),
        (LOST.roll(1, 0), OUTLIER, OUTLIER, ""),  # another row
        (LOST, OUTLIER, OUTLIER[:5], ""),
        (LOST, OUTLIER, OUTLIER.long(), ""),
    ],
)
def test_rows_that_are_far_larger_than_others(out, given, inputs, text):
    assert far_rows(out, [given], [("0", inputs)]) == text
