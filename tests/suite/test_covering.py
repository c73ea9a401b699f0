"""The cases that the mark ``cover`` keeps have all values, or all pairs of values, and are few."""

import itertools

import pytest
from covering import chosen

pytest_plugins = ["pytester"]


SIZES = [(3, 1), (2, 3), (6, 6, 2), (20, 8, 3), (3, 3, 3, 3), (2, 2, 2, 2, 2)]


def rows_of(sizes, strength):
    cases = list(itertools.product(*(range(size) for size in sizes)))
    return [cases[position] for position in chosen(cases, strength)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_occurs(sizes, strength):
    rows = rows_of(sizes, strength)
    for factors in itertools.combinations(range(len(sizes)), strength):
        wanted = set(itertools.product(*(range(sizes[f]) for f in factors)))
        assert {tuple(row[f] for f in factors) for row in rows} == wanted


def test_cases_that_are_no_full_product_all_run():
    cases = list(itertools.product("abc", "de"))
    assert len(chosen(cases, 1)) == 3
    assert chosen(cases, 2) == set(range(6))
    assert chosen([cases[4]], 1) == {0}
    assert chosen(cases[:5], 2) == set(range(5))


PRODUCT = '''
import pytest

@pytest.mark.cover(1)
@pytest.mark.parametrize(("a", "c"), [([], 1), ([], 1), ([], 2)], ids=["0", "1", "2"])
@pytest.mark.parametrize("b", range(3))
def test_it(a, b, c):
    """One parametrize is one factor, whatever its values."""
'''


@pytest.mark.parametrize(
    ("given", "passed"),
    [(["-m", "not slow"], 3), (["-m", "slow"], 6), ([], 9), (["-m", "not slow", "test_p.py::test_it[0-1]"], 1)],
)
def test_what_is_not_kept_is_slow_and_runs_when_it_is_named(given, passed, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_p=PRODUCT)
    pytester.makeconftest(
        "import covering, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): covering.mark_the_rest_slow(items)\n"
    )
    found = pytester.runpytest_inprocess("-W", "ignore::pytest.PytestUnknownMarkWarning", *given)
    found.assert_outcomes(passed=passed, deselected=9 - passed if len(given) == 2 else 0)
