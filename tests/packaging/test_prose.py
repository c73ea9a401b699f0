"""Pages and code use the field's words: phrases of ``.ci/phrases.txt`` are refused. Every page has one title."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.append(ROOT / "docs" / "benchmarks" / "notes.md")
LINES = [line for line in (ROOT / ".ci" / "phrases.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
PHRASES = dict(line.split(" -> ") for line in LINES)
SOURCES = sorted((ROOT / "ampcompat").rglob("*.py"))
#: Messages that programs print are quoted as they are, and code is no prose.
QUOTED = re.compile(r"```.*?```|``[^`]+``|`[^`\n]*`", re.DOTALL)
#: The tokens of Python code that hold sentences: comments, docstrings and messages.
SENTENCES = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def prose(page: Path) -> str:
    """The page without code, its lines kept in their places."""
    return QUOTED.sub(lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"))


def sentences(code):
    """The comments and strings of Python ``code``, its lines kept in their places; quoted code is left out."""
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in SENTENCES:
            text = QUOTED.sub(lambda quoted: "\n" * quoted[0].count("\n"), token.string)
            for offset, line in enumerate(text.split("\n")):
                lines[token.start[0] - 1 + offset] += line
    return "\n".join(lines)


def found(text: str) -> list[tuple[int, str]]:
    """Line number and advice of each refused phrase."""
    lines = enumerate(text.splitlines(), 1)
    return [(at, f"{line.strip()} - {PHRASES[p]}") for at, line in lines for p in PHRASES if re.search(p, line, re.I)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_refused_phrase_is_in_the_prose(page):
    assert found(prose(page)) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_refused_phrase_is_in_the_code(source):
    assert found(sentences(source.read_text(encoding="utf-8"))) == []


def test_comments_docstrings_and_messages_are_found_and_names_are_not():
    code = 'nobody = 1\n"""One.\n\nNobody, ``nobody``."""\n# nobody\nraise ValueError(f"{nobody} asks nobody")\n'
    assert [at for at, _ in found(sentences(code))] == [4, 5, 6]


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
