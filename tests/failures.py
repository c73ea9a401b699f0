"""The failures of a run, kept while it goes on: if it were ended from outside, they would be lost."""

from pathlib import Path

import pytest


class Failures:
    """A plugin of pytest that writes each failure to a file when it happens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test that failed, or what failed before or after it."""
        self.write(report, f"{report.nodeid} ({report.when})")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a file that could not be imported."""
        self.write(report, report.nodeid)

    def write(self, report: pytest.TestReport | pytest.CollectReport, title: str) -> None:
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{title}\n{report.longreprtext}\n\n")
