"""Large files."""

import pytest

from ampcompat.tools.check import scan


@pytest.mark.parametrize(
    "text", ["pip install ", "[", "a\\\n", "=", " " * 20, "- ", "apex[", "#", "'", "\n", "from import\n", "except a, "]
)
def test_texts_that_regular_expressions_might_stumble_over(text, tmp_path):
    """A quarter of a megabyte in one line, or of nothing: minutes where an expression goes back and forth."""
    manifests = ("requirements.txt", "setup.cfg", "build.sh", "environment.yml")
    for name in manifests:
        (tmp_path / name).write_text(text * (2**18 // len(text)))
    (tmp_path / "a.py").write_text("from apex import amp\n" + text * (2**16 // len(text)) + "(")
    assert scan(tmp_path).files == len(manifests) + 1
