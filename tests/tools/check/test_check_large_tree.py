"""Large trees and files: what is not needed is not parsed, and what nobody wrote by hand takes no hour."""

import ast
import json

import pytest

from ampcompat.tools.check import documents, scan
from ampcompat.tools.check.scan import MOST_NODES

TRAP = "import torch\ns = s.masked_fill(mask, -1e9)\n"
TRAIN = "from apex import amp\nm, o = amp.initialize(m, o)\n"


def test_files_without_apex_are_parsed_only_beside_amp(tmp_path, monkeypatch):
    texts = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda code, *args, **kwargs: texts.append(code) or real(code, *args, **kwargs))
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    report = scan(tmp_path)
    assert (report.files, report.findings, texts) == (5, [], [])
    (tmp_path / "train.py").write_text(TRAIN)
    assert [f.path for f in scan(tmp_path).findings if f.kind == "trap"] == [f"m{i}.py" for i in range(5)]


def test_a_file_too_long_to_be_searched_says_so(tmp_path):
    """Its symbols are found all the same."""
    (tmp_path / "train.py").write_text(TRAIN + TRAP + "x = [" + "1,\n" * MOST_NODES + "]\n")
    found = {f.name: f.level for f in scan(tmp_path).findings}
    assert found == {"apex.amp": "works", "apex.amp.initialize": "works", "too_long": "note"}


def test_a_notebook_whose_lines_are_not_found_takes_no_longer(tmp_path):
    """As one string with line feeds, which no line of the file holds."""

    def steps(count):
        cells = [{"cell_type": "code", "metadata": {}, "outputs": ["x"] * count, "source": "x = 1\n" * count}]
        text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=1)
        parsed = []
        real = json.loads
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "loads", lambda text: parsed.append(text) or real(text))
            documents.Notebook.read(text)
        return len(parsed)

    assert steps(400) < 5 * steps(100)


@pytest.mark.parametrize(
    "text", ["pip install ", " " * 20, "- ", "apex[", "#", "'", "\n", "from import\n", "except a, "]
)
def test_texts_that_regular_expressions_might_stumble_over(text, tmp_path):
    """Megabytes in one line, or of nothing: minutes where an expression goes back and forth."""
    (tmp_path / "requirements.txt").write_text(text * (2**20 // len(text)))
    (tmp_path / "a.py").write_text("from apex import amp\n" + text * (2**18 // len(text)) + "(")
    assert scan(tmp_path).files == 2
