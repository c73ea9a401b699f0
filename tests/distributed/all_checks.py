"""All checks that ``launch.py`` runs on every rank, in order."""

import checks
import dcp_checks
import ddp_checks
import native_checks
import sharded_checks
import zero_checks

CHECKS = [
    *checks.CHECKS,
    *zero_checks.CHECKS,
    *ddp_checks.CHECKS,
    *native_checks.CHECKS,
    *sharded_checks.CHECKS,
    *dcp_checks.CHECKS,
]
