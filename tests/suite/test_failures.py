"""``--failures-to FILE`` keeps the failures of a run that never comes to its summary."""

from pathlib import Path

pytest_plugins = ["pytester"]

TESTS = """
import os

def test_fails(): assert 6 * 9 == 42
def test_passes(): pass
def test_ends_the_process(): os._exit(3)
"""


def test_a_run_that_is_ended_from_outside(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makepyfile(test_it=TESTS, test_not_imported="import there_is_no_such_module")
    pytester.makeconftest(
        "from pathlib import Path\n"
        "from failures import Failures\n"
        "def pytest_configure(config): config.pluginmanager.register(Failures(Path('failures.txt')))\n"
    )
    pytester.runpytest_subprocess("--continue-on-collection-errors", "--tb=short")
    kept = (pytester.path / "failures.txt").read_text()
    assert "test_it.py::test_fails (call)" in kept
    assert "assert (6 * 9) == 42" in kept
    assert "No module named 'there_is_no_such_module'" in kept
    assert "test_passes" not in kept
