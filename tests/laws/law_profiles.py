"""Profiles of the property tests: 100 examples by default, 2,000 with ``HYPOTHESIS_PROFILE=nightly``.

The profiles are derandomized: a run of the checks does not fail by the luck of the day. ``HYPOTHESIS_PROFILE=explore``
draws new examples each time.
"""

import os

from hypothesis import HealthCheck, settings

NIGHTLY = 2000
#: Seeds of the random programs, each a test. The mark ``rotate`` takes a share of them.
SEEDS = range(NIGHTLY)
# The autouse fixture resets ampcompat once per test; the machines of these tests reset it themselves per example.
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None}
settings.register_profile("ci", max_examples=100, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=NIGHTLY, derandomize=True, **COMMON)
settings.register_profile("explore", max_examples=NIGHTLY, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
