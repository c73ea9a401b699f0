"""The table of repositories that were run says what its data file says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "repositories.py"))


def test_the_page_is_what_the_data_file_says():
    written = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert written == PAGE["page"](), "python docs/repositories.py writes it"


def test_every_run_is_a_row_with_its_figures():
    table = [line for line in PAGE["table"]().splitlines() if line.startswith("| ")][1:]
    assert len(table) == len(PAGE["runs"]())
    for run, line in zip(PAGE["runs"](), table, strict=True):
        assert all(f"| {run[field]} |" in line for field in ("run", "apex", "ampcompat"))


def test_the_difference_of_two_figures():
    assert PAGE["difference"]({"apex": "2.0 .5", "ampcompat": "2.0 .625"}) == 0.25
    assert PAGE["difference"]({"apex": "2.10", "ampcompat": "2.1"}) == 0
    assert PAGE["difference"]({"apex": "trains", "ampcompat": "trains"}) is None


def test_runs_that_are_further_apart_are_those_at_o2():
    far = [run for run in PAGE["runs"]() if (PAGE["difference"](run) or 0) >= PAGE["NEAR"]]
    assert far
    assert all("O2" in run["run"] for run in far)


def test_a_run_of_what_a_commit_changed_links_to_that_commit():
    shown = PAGE["linked"]({"repository": "a/b", "commit": "1234567~1"})
    assert shown == "[a/b](https://github.com/a/b/commit/1234567), before it"
