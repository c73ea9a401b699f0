"""All checks that ``launch.py`` runs on every rank, in order, and the levels of each."""

import os

import checks
import dcp_checks
import ddp_checks
import native_checks
import sharded_checks
import zero_checks

AT_EVERY_LEVEL = [
    *checks.CHECKS,
    *zero_checks.CHECKS,
    *ddp_checks.CHECKS,
    *native_checks.CHECKS,
    *sharded_checks.CHECKS,
    *dcp_checks.CHECKS,
]


def two_of(levels: list[str]) -> list[str]:
    """Return the level that casts functions and the one that casts the model, or the only one that a check has."""
    return [level for level in levels if level in ("O1", "O2")] or levels[:1]


AT_TWO_LEVELS = [(check, two_of(levels)) for check, levels in AT_EVERY_LEVEL]
#: What ``launch.py`` runs.
CHECKS = AT_TWO_LEVELS if os.environ.get("TEST_LEVELS") == "two" else AT_EVERY_LEVEL
