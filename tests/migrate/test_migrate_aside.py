"""Statements that a translation leaves alone are set aside and come back; the result is that of the whole text."""

import random
from pathlib import Path

import pytest
from legacy_shapes import HEAD, MARKED, RIGHT, SETUP, indented, loop

from ampcompat.check.source import Source
from ampcompat.migrate.native import _rewritten, rewrite_native
from ampcompat.migrate.native.aside import Aside, Lost
from ampcompat.migrate.native.facts import Facts

FIXTURES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "fixtures").glob("*_before.py"))}
SHAPES = {**FIXTURES, **{name: HEAD + code for name, code in {**RIGHT, **MARKED}.items()}}
#: Statements that begin with one of these words may have others put before them.
PLAIN = ("with", "opt", "model", "loss", "return", "def", "class", "LOSSES", "scaled", "torch", "import", "from")


def with_plain_statements(code, seed):
    """``code`` with statements that no translation touches put between its own."""
    rng, lines = random.Random(seed), []
    for line in code.splitlines():
        words = line.split("(")[0].replace(".", " ").split()
        decorated = bool(lines) and lines[-1].lstrip().startswith("@")
        if words and words[0] in PLAIN and not decorated and rng.random() < 0.5:
            indent, n = line[: len(line) - len(line.lstrip())], len(lines)
            lines += rng.choice(
                [
                    [f"{indent}# note {n}", f"{indent}plain = {n}", ""],
                    [f"{indent}plain = [{n},", "  2]", f"{indent}# behind"],
                    [
                        f"{indent}if {n}:",
                        f"{indent}    plain = {n}",
                        f"{indent}    # end",
                        f"{indent}plain = '''",
                        "'''",
                    ],
                ]
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def both(code):
    return [_rewritten(Source("", code), everything) for everything in (False, True)]


@pytest.mark.parametrize("name", [*FIXTURES, *list(RIGHT)[::8], *list(MARKED)[::8]])
def test_the_result_is_that_of_the_whole_text(name):
    code = with_plain_statements(SHAPES[name], name)
    short, whole = both(code)
    assert short == whole
    assert "plain = " in short[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_result_is_that_of_the_whole_text_for_each_shape(name):
    for seed in range(3):
        code = with_plain_statements(SHAPES[name], seed)
        try:
            short, whole = both(code)
        except Lost:
            continue
        assert short == whole


SCRIPT = HEAD + SETUP


@pytest.mark.parametrize(
    "code",
    [
        SCRIPT + "plain = 1\n" + loop("opt.step()\nplain = 2"),
        SCRIPT + loop("plain = [\n  1]\nopt.step()"),
        SCRIPT + loop("if i:\n    plain = 1\nelif x is y:\n    plain = 2\n    opt.step()\nelse:\n    plain = 3"),
        SCRIPT + loop("opt.step()", forward="out = model(x)\nplain = i\nloss = F.cross_entropy(out, y)"),
        SCRIPT + loop("opt.step()", forward="loss = F.cross_entropy(model(x), y)\nloss = loss / 2\nplain = i"),
        SCRIPT.replace("import torch\n", "'''What it does.'''\nplain = 1\nimport torch\n", 1)
        + loop("opt.step()\nplain = 2"),
        HEAD
        + "def main():\n"
        + indented("plain = 1\n" + SETUP + loop("plain = 2\nopt.step()\nplain = 3"))
        + "main()\n",
    ],
)
@pytest.mark.parametrize("change", [str, lambda c: c.replace("    ", "\t"), lambda c: c.replace("\n", "\r\n")])
def test_plain_statements_are_not_shown_and_come_back(code, change):
    code = change(code)
    source = Source("", code)
    aside = Aside(source, Facts(source).casts.needs)
    assert aside.code.count("plain = ") < code.count("plain = ")
    assert aside.restored(aside.code) == code
    short, whole = both(code)
    assert short == whole


@pytest.mark.parametrize(
    "place", ["from apex import amp\nplain = 1", "plain = 1\nfrom apex import amp", "pass\nplain = 1"]
)
def test_a_block_keeps_a_statement_where_its_import_goes(place):
    code = f"import torch\nfrom apex import amp\n\n\ndef f():\n    if torch:\n{indented(place, 2)}    return amp\n"
    short, whole = both(code.replace("return amp", "return 1"))
    assert short == whole


def test_what_did_not_come_back_is_an_error():
    aside = Aside(Source("", "from apex import amp\nplain = 1\nfor i in x:\n    plain = 1\n    print(model.grad)\n"))
    first, second = (line for line in aside.code.splitlines(keepends=True) if "aside" in line)
    assert second.startswith("    #")
    for lost in (
        aside.code.replace(first, ""),
        aside.code.replace(second, second.lstrip()),
        aside.code.replace(first, "!").replace(second, first).replace("!", second),
    ):
        with pytest.raises(Lost):
            aside.restored(lost)


def test_what_did_not_come_back_is_translated_as_a_whole(monkeypatch):
    code = with_plain_statements(SHAPES["simple_before"], "simple_before")
    whole, restored, calls = rewrite_native(Source("", code)), Aside.restored, []

    def lost_at_first(aside, code):
        calls.append(len(aside.runs))
        if len(calls) == 1:
            raise Lost
        return restored(aside, code)

    monkeypatch.setattr(Aside, "restored", lost_at_first)
    assert rewrite_native(Source("", code)) == whole
    assert calls[0] > 0
    assert set(calls[1:]) == {0}
