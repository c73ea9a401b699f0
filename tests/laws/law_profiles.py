"""Profiles of the property tests: 100 examples by default, 2,000 with ``HYPOTHESIS_PROFILE=nightly``.

The profiles are derandomized: a run of the checks does not fail by the luck of the day. ``HYPOTHESIS_PROFILE=explore``
draws new examples each time. ``LAWS_SHARE=3/7`` takes every seventh of nightly's random programs, from the third on; a
number beyond 7 begins again, so that a count of commits gives each commit the next share.
"""

import os

from hypothesis import HealthCheck, settings

NIGHTLY = 2000
# The autouse fixture resets ampcompat once per test; the machines of these tests reset it themselves per example.
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None}
settings.register_profile("ci", max_examples=100, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=NIGHTLY, derandomize=True, **COMMON)
settings.register_profile("explore", max_examples=NIGHTLY, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def seeds() -> range:
    """Return the seeds of the random programs that are run: the first ones, or the share that is asked for."""
    share = os.environ.get("LAWS_SHARE")
    if share is None:
        return range(settings().max_examples)
    number, shares = map(int, share.split("/"))
    return range(NIGHTLY)[number % shares :: shares]
