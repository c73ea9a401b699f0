"""The page shows the diff that the command prints."""

import re
from pathlib import Path

from running import migrate_tree

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "check_and_migrate.md"


def shown_diff():
    return re.search(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def old_lines(diff):
    """The file before, whose every line is in the diff but for those between two hunks."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "-"))


def test_the_page_shows_the_diff_of_the_command(tmp_path):
    diff = shown_diff()
    (tmp_path / "train.py").write_text(old_lines(diff))
    change, copied = migrate_tree(tmp_path, "native")
    assert change.todos == []
    assert change.diff() == diff
    assert f"[{copied.name}](../ampcompat/tools/migrate/{copied.name})" in PAGE.read_text()
