"""Lines are Python's: a form feed or another separator of text in a line ends none."""

import pytest
from running import migrate_tree

from ampcompat.tools.check import scan, scan_source
from ampcompat.tools.check.split_lines import indent_of, lines_of
from ampcompat.tools.migrate import migrate_source

#: What str.splitlines takes for the end of a line beside those of Python.
SEPARATORS = ["\f", "\v", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
MARKED = "from apex import RNN\nfrom apex import amp\nRNN.LSTM(4)\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_where_the_tokenizer_ends_them(end):
    text = f"a{end}{end}b\fc\u2028d{end}e"
    assert lines_of(text) == ["a", "", "b\fc\u2028d", "e"]
    assert "".join(lines_of(text, keepends=True)) == text


def test_a_form_feed_is_no_indentation():
    assert [indent_of(line) for line in ("\t  x\n", "\f  x", "x")] == ["\t  ", "", ""]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("place", ["# a{}b\n", "s = 'a{}b'\n"])
def test_a_separator_in_a_line_moves_no_mark_and_no_region(separator, place):
    first = place.format(separator)
    for to in ("ampcompat", "native"):
        plain = migrate_source(place.format("-") + MARKED, to)
        result = migrate_source(first + MARKED, to)
        assert result.code == plain.code.replace(place.format("-"), first)
        assert result.todos == plain.todos


def test_the_diff_of_a_file_with_form_feeds(tmp_path):
    """``patch`` can apply it."""
    (tmp_path / "a.py").write_text("x = 1\n\f\nfrom apex import amp\n")
    (change,) = migrate_tree(tmp_path)
    assert change.diff().splitlines(keepends=True)[3:] == [
        " x = 1\n", " \f", "\n", "-from apex import amp\n", "+from ampcompat import amp\n",
    ]  # fmt: skip
    assert "No newline" not in change.diff()


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_comment_ignores_a_finding_below_a_separator(separator):
    code = f"x = 'a{separator}b'\nfrom apex import amp\namp.nonsense()  # ampcompat: ignore\n"
    assert "apex.amp.nonsense" not in {f.name for f in scan_source(code)}
    assert "apex.amp.nonsense" in {f.name for f in scan_source(code.replace("  # ampcompat: ignore", ""))}


def test_what_installs_apex_is_found_on_its_line(tmp_path):
    (tmp_path / "requirements.txt").write_text("# a\fb\ntorch\napex\n")
    assert [(f.line, f.name) for f in scan(tmp_path).findings] == [(3, "installs_apex")]
    (change,) = migrate_tree(tmp_path)
    assert change.new.startswith("# a\fb\ntorch\n# TODO(ampcompat): ")
    assert change.new.endswith("\nampcompat\n")
