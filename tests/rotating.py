"""The mark ``rotate``: of a test's cases run a share, and with the next commit the next.

``TESTS_SHARE`` says which share, as any number; ``.ci/run`` passes the count of commits. Without it that of 0 runs.
"""

import os
import zlib
from collections.abc import Sequence

import pytest


def is_in_share(position: int, shares: int) -> bool:
    """Return whether a case belongs to the share of this run; ``shares`` numbers in a row take each case once."""
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
    next_position: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("rotate")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        # Tests begin at different cases: so each share has as much to do, of tests with one case too.
        position = next_position.get(test, zlib.crc32(test.encode()))
        next_position[test] = position + 1
        if not is_in_share(position, mark.args[0]):
            item.add_marker(pytest.mark.slow)
