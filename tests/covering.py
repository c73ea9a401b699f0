"""The mark ``cover``: of a product of parameters, run the cases in which all values, or all pairs of values, occur."""

import math
from collections.abc import Hashable, Sequence

import pytest
from allpairspy import AllPairs


def chosen(cases: Sequence[tuple[Hashable, ...]], strength: int) -> set[int]:
    """Return the positions of the cases to run.

    All run where they are not the full product of their factors: some were named on the command line.

    Args:
        cases: the value that each factor has, for each case.
        strength: 1 for every value, 2 for every pair of values.
    """
    factors = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    is_full_product = math.prod(len(values) for values in factors) == len(cases)
    if not is_full_product:
        return set(range(len(cases)))
    rows = every_value(factors) if strength == 1 else AllPairs(factors, n=strength)
    wanted = {tuple(row) for row in rows}
    return {position for position, case in enumerate(cases) if case in wanted}


def every_value(factors: Sequence[Sequence[Hashable]]) -> list[list[Hashable]]:
    """Return as many rows as the longest factor has values; each shorter factor begins again and again.

    ``AllPairs(factors, n=1)`` would leave the shorter factors at one value in most of the rows.
    """
    longest = max(len(values) for values in factors)
    return [[values[row % len(values)] for values in factors] for row in range(longest)]


def values_of(case: pytest.Function) -> tuple[Hashable, ...]:
    """Return the value of each factor, as its identity: parameters need not be hashable.

    The parameters of one ``parametrize`` change together and are one factor.
    """
    identities = {name: id(value) for name, value in case.callspec.params.items()}
    found = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(identities.pop(name) for name in names))
    return (*found, *identities.values())


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    """Apply ``@pytest.mark.cover(n)``: keep cases in which every ``n`` factors take all their values.

    The other cases of the test are marked slow.
    """
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("cover"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        strength = cases[0].get_closest_marker("cover").args[0]
        kept = chosen([values_of(case) for case in cases], strength)
        for position, case in enumerate(cases):
            if position not in kept:
                case.add_marker(pytest.mark.slow)
