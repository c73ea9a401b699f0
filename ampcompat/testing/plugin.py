"""The pytest plugin: tests with an argument ``opt_level`` run once per level.

``@pytest.mark.opt_levels("O1", "O2")`` names the levels of a test, a class or a module; without it they are O0 to O3.
A fixture or a ``parametrize`` of that name in a project of its own takes precedence, as with any fixture of a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

#: apex's levels.
DEFAULT = ("O0", "O1", "O2", "O3")


@pytest.fixture(params=DEFAULT)
def opt_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The opt_level of this run of the test; amp is reset before it and after it."""
    from ampcompat._state import state

    state.reset()
    yield str(request.param)
    state.reset()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "opt_levels(*levels): the levels that the fixture opt_level goes through")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn the nearest marker into a ``parametrize``, which pytest prefers to the fixture's own levels."""
    test = metafunc.definition
    marker = test.get_closest_marker("opt_levels")
    if marker is None or "opt_level" not in metafunc.fixturenames or _parametrized(test):
        return
    from ampcompat.amp.levels import LEVELS  # imports torch

    levels = marker.args
    if not levels or marker.kwargs or any(level not in [*LEVELS] for level in levels):
        given = [*map(repr, levels), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
        pytest.fail(
            f"{test.nodeid}: opt_levels({', '.join(given)}) - it takes one or more of {', '.join(LEVELS)}"
            ' - write it as @pytest.mark.opt_levels("O1", "O2").',
            pytrace=False,
        )
    test.add_marker(pytest.mark.parametrize("opt_level", levels, indirect=True))


def _parametrized(test: pytest.Item) -> bool:
    """Whether a ``parametrize`` of the test's own gives it its levels."""
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "opt_level" in [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]:
            return True
    return False
