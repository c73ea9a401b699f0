"""What is due for a weight: every combination of what was written, by the table ``WRITES``."""

import itertools

import pytest
from internals import due
from state_tables import WRITES

WHAT = {
    "half's version or address has moved": "half_moved",
    "value's version has moved": "value_moved",
    "half's `data` was taken": "half_taken",
    "value's `data` was taken": "value_taken",
}


def test_the_table_names_everything_that_is_tracked():
    assert [*WHAT, "none of these"] == WRITES.events


@pytest.mark.parametrize("written", list(itertools.product([False, True], repeat=len(WHAT))))
def test_the_first_row_that_fits_says_what_is_due(written):
    tracked = dict(zip(WHAT.values(), written, strict=True))
    fitting = [row for row in WRITES.rows if tracked.get(WHAT.get(row[0]), True)]
    assert due(**tracked).value == fitting[0][1]
