"""The mutants of ``python -m tests.mutation``: each compiles, changes code, and is put into functions that exist."""

from pathlib import Path

import pytest
from mutation.mutants import codes, mutants_of, sample

pytestmark = pytest.mark.slow  # of a tool of the tests

ROOT = Path(__file__).parents[2]
SOURCE = '''
def f(a, b, out=None):
    """Keep the docstring."""
    if a < b and not out:
        raise ValueError(f"{a + 1}")
    out[0] = max(a, b)
    return sum(n + 1 for n in (a, b))
'''
CHANGES = {
    "negate": "a < b",
    "move the boundary": "a < b",
    "exchange and/or": "a < b and (not out)",
    "drop not": "not out",
    "delete the statement": "out[0] = max(a, b)",
    "swap the first two arguments": "max(a, b)",
    "return None": "return sum((n + 1 for n in (a, b)))",
    "exchange the operator": "n + 1",
    "change the constant": "0",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    return path


def test_kinds_and_what_is_left_alone(file):
    found = mutants_of(file, "some.py")
    assert {(m.kind, m.was) for m in found} >= set(CHANGES.items())
    assert {m.function for m in found} == {"f"}
    assert not any("docstring" in m.was or m.was == "a + 1" for m in found)


def test_a_changed_function_computes_something_else(file):
    space = {}
    exec(compile(SOURCE, str(file), "exec"), space)
    results = set()
    for mutant in mutants_of(file, "some.py"):
        (code,) = [code for (name, _), code in codes(file, mutant).items() if name == "f"]
        space["f"].__code__ = code
        try:
            out = {}
            results.add((space["f"](2, 1, out), str(out)))
        except (ValueError, TypeError) as error:
            results.add(type(error))
    assert (5, "{0: 2}") in results  # what is changed is not on this way
    assert {(None, "{0: 2}"), (5, "{}"), (1, "{0: 2}"), ValueError} <= results


def test_the_sample_is_the_same_every_time_and_one_a_line():
    first, again = (sample(ROOT / "ampcompat" / "amp", ROOT, 30, 1) for _ in range(2))
    assert first == again
    assert len({(m.file, m.line) for m in first}) == 30
    assert all(codes(ROOT / m.file, m) for m in first)
