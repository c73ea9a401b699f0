"""``apex.testing.common_utils``: decorators that skip tests, as ROCm's fork of apex has them.

``APEX_TEST_WITH_ROCM=1`` and ``APEX_SKIP_FLAKY_TEST=1`` switch them on.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["SKIP_FLAKY_TEST", "TEST_WITH_ROCM", "skipFlakyTest", "skipIfRocm"]

P = ParamSpec("P")
R = TypeVar("R")

TEST_WITH_ROCM = os.environ.get("APEX_TEST_WITH_ROCM") == "1"
SKIP_FLAKY_TEST = os.environ.get("APEX_SKIP_FLAKY_TEST") == "1"


def skipIfRocm(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a test that cannot pass on ROCm: it raises ``unittest.SkipTest`` while ``TEST_WITH_ROCM`` is set."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if TEST_WITH_ROCM:
            raise unittest.SkipTest("APEX_TEST_WITH_ROCM=1: this test does not pass on ROCm.")
        return fn(*args, **kwargs)

    return wrapper


def skipFlakyTest(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a test that fails at times: it raises ``unittest.SkipTest`` while ``SKIP_FLAKY_TEST`` is set."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if SKIP_FLAKY_TEST:
            raise unittest.SkipTest("APEX_SKIP_FLAKY_TEST=1: this test fails at times.")
        return fn(*args, **kwargs)

    return wrapper
