"""The pytest plugin: a test runs once for each level, and amp is reset between them."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ampcompat

pytest_plugins = ["pytester"]

INSTALLED = any(entry.value == "ampcompat.testing.plugin" for entry in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "ampcompat.testing.plugin")
STRICT = ("--strict-markers", "--strict-config", "-W", "error", "-p", "no:cacheprovider", "-v")


@pytest.fixture
def run(pytester):
    """Run pytest on a test module with only this plugin beside its own."""

    def run(source, *options):
        pytester.makepyfile(source)
        # The package was imported before this pytest could rewrite its assertions.
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        return pytester.runpytest_inprocess(*STRICT, *quiet, *PLUGIN, *options)

    return run


@pytest.fixture
def run_alone(pytester, monkeypatch):
    """Run pytest as ``run`` does, in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(ampcompat.__file__).resolve().parents[1]))

    def run(source):
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess(*STRICT, *PLUGIN)

    return run


def test_a_test_runs_once_per_level(run_alone):
    """The plugin does not import torch for other tests."""
    result = run_alone(
        """
        import sys

        def test_levels(opt_level):
            assert opt_level in ("O0", "O1", "O2", "O3")

        def test_without():
            assert "torch" not in sys.modules
        """
    )
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines([f"*test_levels?{level}?*" for level in ("O0", "O1", "O2", "O3")])


def test_the_nearest_marker_names_the_levels(run):
    result = run(
        """
        import pytest

        pytestmark = pytest.mark.opt_levels("O2")

        def test_module(opt_level):
            assert opt_level == "O2"

        @pytest.mark.opt_levels("O4", "O5")
        def test_own(opt_level):
            assert opt_level in ("O4", "O5")

        @pytest.mark.parametrize("opt_level, width", [("O3", 8)])
        def test_parameters(opt_level, width):
            assert opt_level == "O3"

        def test_untouched():
            pass
        """
    )
    result.assert_outcomes(passed=5)


def test_fixtures_and_parameters_of_the_same_name_come_first(run):
    result = run(
        """
        import pytest

        @pytest.fixture
        def opt_level():
            return "mine"

        def test_fixture(opt_level):
            assert opt_level == "mine"

        @pytest.mark.parametrize("opt_level", ["x"])
        def test_parameter(opt_level):
            assert opt_level == "x"
        """
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "()"),
        ("'01'", "('01')"),
        ("['O1', 'O2']", "(['O1', 'O2'])"),
        ("levels=['O1']", "(levels=['O1'])"),
        ("'O1', 2", "('O1', 2)"),
    ],
)
def test_levels_that_do_not_exist_are_refused(run, arguments, shown):
    result = run(
        f"""
        import pytest

        @pytest.mark.opt_levels({arguments})
        def test_level(opt_level):
            pass
        """
    )
    assert result.ret != 0
    line = next(line for line in result.stdout.lines if "it takes one or more" in line)
    assert f"::test_level: opt_levels{shown} - it takes one or more of O0, O1, O2, O3, O4, O5 - write " in line
    assert "INTERNALERROR" not in result.stdout.str()
    assert "plugin.py" not in result.stdout.str()


def test_it_can_be_left_out(run):
    name = "ampcompat" if INSTALLED else "ampcompat.testing.plugin"
    result = run("def test_plain(): pass", "-p", f"no:{name}")
    result.assert_outcomes(passed=1)


def test_amp_is_reset_around_each_level(run):
    result = run(
        """
        import torch

        from ampcompat import amp

        def test_reset(opt_level):
            assert not hasattr(amp._amp_state, "opt_properties")
            amp.initialize(torch.nn.Linear(1, 1), opt_level=opt_level, verbosity=0)

        def test_after():
            assert not hasattr(amp._amp_state, "opt_properties")
        """
    )
    result.assert_outcomes(passed=5)
