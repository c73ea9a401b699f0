"""The example of the page is what the check says of its script."""

import re
from pathlib import Path

from ampcompat.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "check_and_migrate.md"


def test_the_example_is_what_is_printed(tmp_path, capsys, monkeypatch):
    text = PAGE.read_text("utf-8")
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"\$ ampcompat check repo\n(.*?)```", text, re.DOTALL)
    assert script is not None
    assert shown is not None
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.py").write_text(script[1])
    monkeypatch.chdir(tmp_path)
    assert main(["check", "repo"]) == 1
    assert capsys.readouterr().out == shown[1]
