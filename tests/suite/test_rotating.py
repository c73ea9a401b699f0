"""The shares that the mark ``rotate`` makes have each case once; the rest is slow."""

import pytest

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.mark.rotate(3)
@pytest.mark.parametrize("case", range(8))
def test_it(case):
    print("ran", case)

def test_other(): pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_p=CASES)
    pytester.makeconftest(
        "import pytest, rotating\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(config, items): rotating.mark_other_shares_slow(items, config.args)\n"
    )

    def cases(*arguments, share=None):
        if share is not None:
            monkeypatch.setenv("TESTS_SHARE", share)
        done = pytester.runpytest_inprocess("-W", "ignore::pytest.PytestUnknownMarkWarning", "-s", *arguments)
        return [int(line.split()[-1].rstrip(".")) for line in done.outlines if "ran " in line]

    return cases


def test_three_commits_in_a_row_run_each_case_once(run):
    shares = [run("-m", "not slow", share=str(count)) for count in (1001, 1002, 1003)]
    assert sorted(len(share) for share in shares) == [2, 3, 3]
    assert sorted(sum(shares, [])) == list(range(8))


def test_without_a_number_it_is_the_share_of_zero(run, monkeypatch):
    monkeypatch.delenv("TESTS_SHARE", raising=False)
    assert run("-m", "not slow") == run("-m", "not slow", share="0")


def test_all_run_where_the_slow_are_wanted_or_a_test_is_named(run):
    assert run() == list(range(8))
    assert run("-m", "not slow", "test_p.py::test_it") == list(range(8))
