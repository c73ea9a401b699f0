"""The mark ``rotate``: of many cases run a share, and with the next commit the next.

``TESTS_SHARE`` says which share, as any number; ``.ci/run`` passes the count of commits. Without it the first one runs.
"""

import os
from collections.abc import Sequence

import pytest


def is_in_share(position: int, shares: int) -> bool:
    """Return whether a case belongs to the share of this run; ``shares`` runs in a row take each case once."""
    share = int(os.environ.get("TESTS_SHARE", "0"))
    return position % shares == share % shares


def mark_other_shares_slow(items: Sequence[pytest.Item], words: Sequence[str]) -> None:
    """Apply ``@pytest.mark.rotate(n)``: one of ``n`` cases of a test stays, the others are marked slow.

    All stay if a test is named on the command line.

    Args:
        items: The tests.
        words: The files, folders and tests on the command line.
    """
    if any("::" in word for word in words):
        return
    cases: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("rotate")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        position = cases.setdefault(test, 0)
        cases[test] += 1
        if not is_in_share(position, mark.args[0]):
            item.add_marker(pytest.mark.slow)
