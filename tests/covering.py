"""Choose a few cases of a product of options in which all values, or all pairs of values, occur."""

import itertools
from collections.abc import Hashable, Sequence

import pytest


def covering_rows(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Return rows of indices in which every ``strength`` factors take all combinations of their values.

    Greedy and without chance: each row starts from the first combination that is still missing, and every further
    factor takes the value that adds most of the missing ones. Ties go to the value that was used least, so that
    factors which add nothing vary too.

    Args:
        sizes: how many values each factor has.
        strength: 1 for every value, 2 for every pair of values.
    """
    strength = min(strength, len(sizes))
    missing = dict.fromkeys(
        tuple(zip(factors, values, strict=True))
        for factors in itertools.combinations(range(len(sizes)), strength)
        for values in itertools.product(*(range(sizes[f]) for f in factors))
    )  # a dict keeps its order
    used = [[0] * size for size in sizes]
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor, size in enumerate(sizes):
            if factor not in row:
                row[factor] = max(
                    range(size),
                    key=lambda value: (gain({**row, factor: value}, factor, missing, strength), -used[factor][value]),
                )
        for factors in itertools.combinations(range(len(sizes)), strength):
            missing.pop(tuple((f, row[f]) for f in factors), None)
        for factor, value in row.items():
            used[factor][value] += 1
        rows.append(tuple(row[f] for f in range(len(sizes))))
    return rows


def gain(row: dict[int, int], factor: int, missing: dict[tuple[tuple[int, int], ...], None], strength: int) -> int:
    """Count the missing combinations of ``factor`` with the factors that have a value."""
    others = sorted(set(row) - {factor})
    return sum(
        tuple(sorted([(factor, row[factor]), *((f, row[f]) for f in rest)])) in missing
        for rest in itertools.combinations(others, strength - 1)
    )


def chosen(cases: Sequence[tuple[Hashable, ...]], strength: int) -> set[int]:
    """Return the positions of the cases to run: a covering, or all where they are no full product of their factors."""
    factors = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    position = {case: at for at, case in enumerate(cases)}
    rows = covering_rows([len(values) for values in factors], strength)
    wanted = [tuple(values[i] for i, values in zip(row, factors, strict=True)) for row in rows]
    if any(case not in position for case in wanted):  # not a full product: some were named on the command line
        return set(range(len(cases)))
    return {position[case] for case in wanted}


def values_of(case: pytest.Function) -> tuple[Hashable, ...]:
    """Return which value each factor has: by identity, since parameters need not be hashable.

    Parameters of one ``parametrize`` go together and are one factor.
    """
    identities = {name: id(value) for name, value in case.callspec.params.items()}
    found = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(identities.pop(name) for name in names))
    return (*found, *identities.values())


def mark_the_rest_slow(items: Sequence[pytest.Item]) -> None:
    """Apply ``@pytest.mark.cover(n)``: every ``n`` parameters take all their values; the other cases are slow."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("cover"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        kept = chosen([values_of(case) for case in cases], *cases[0].get_closest_marker("cover").args)
        for at, case in enumerate(cases):
            if at not in kept:
                case.add_marker(pytest.mark.slow)
