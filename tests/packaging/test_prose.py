"""Pages use the field's words: phrases of ``.ci/phrases.txt`` are refused, and every page has one title."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "docs" / "benchmarks" / name for name in ("notes.md", "gpu_on_paper.md")]
LINES = [line for line in (ROOT / ".ci" / "phrases.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
PHRASES = dict(line.split(" -> ") for line in LINES)
#: Messages that programs print are quoted as they are.
QUOTED = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def prose(page: Path) -> str:
    """The page without code, its lines kept in their places."""
    return QUOTED.sub(lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"))


def found(text: str) -> list[tuple[int, str]]:
    """Line number and advice of each refused phrase."""
    lines = enumerate(text.splitlines(), 1)
    return [(at, f"{line.strip()} - {PHRASES[p]}") for at, line in lines for p in PHRASES if re.search(p, line, re.I)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_refused_phrase_is_in_the_prose(page):
    assert found(prose(page)) == []


def test_a_refused_phrase_is_found_and_code_is_not_prose():
    assert [at for at, _ in found("fine\nNobody reads this.")] == [2]
    assert found("`nobody`") == [(1, "`nobody` - " + PHRASES[r"\bnobody\b"])]
    assert QUOTED.sub("", "```text\nnobody\n```") == ""


def test_every_page_has_one_title():
    for page in PAGES:
        titles = re.findall(r"^# .+", QUOTED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
        assert len(titles) == (0 if page.name == "changes.md" else 1), page.name


def test_chinese_paragraphs_are_one_line_each():
    # A line break between two Chinese characters shows as a space.
    text = prose(ROOT / "docs" / "zh_quickstart.md")
    assert re.findall(r"[\u3000-\u9fff\uff00-\uffef]\n[\u3000-\u9fff\uff00-\uffef]", text) == []
