"""Large trees and files."""

import pytest

from ampcompat.tools.check import scan
from ampcompat.tools.check.facts import MOST_NODES

TRAP = "import torch\ns = s.masked_fill(mask, -1e9)\n"
TRAIN = "from apex import amp\nm, o = amp.initialize(m, o)\n"


def test_a_file_too_long_to_be_searched_says_so(tmp_path):
    """Its symbols are found all the same."""
    (tmp_path / "train.py").write_text(TRAIN + TRAP + "x = [" + "1,\n" * MOST_NODES + "]\n")
    found = {f.name: f.level for f in scan(tmp_path).findings}
    assert found == {"apex.amp": "works", "apex.amp.initialize": "works", "too_long": "note"}


@pytest.mark.parametrize(
    "text", ["pip install ", "[", "a\\\n", "=", " " * 20, "- ", "apex[", "#", "'", "\n", "from import\n", "except a, "]
)
def test_texts_that_regular_expressions_might_stumble_over(text, tmp_path):
    """Megabytes in one line, or of nothing: minutes where an expression goes back and forth."""
    manifests = ("requirements.txt", "setup.cfg", "build.sh", "environment.yml")
    for name in manifests:
        (tmp_path / name).write_text(text * (2**20 // len(text)))
    (tmp_path / "a.py").write_text("from apex import amp\n" + text * (2**18 // len(text)) + "(")
    assert scan(tmp_path).files == len(manifests) + 1
