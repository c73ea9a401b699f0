"""What a mistyped line of ``ampcompat run`` is answered."""

import importlib
import os

import pytest

from ampcompat.cli import main
from ampcompat.tools import script


@pytest.fixture(autouse=True)
def ran(monkeypatch, tmp_path):
    """The targets that would have been run."""
    targets = []
    monkeypatch.setattr(script, "run", targets.append)
    monkeypatch.setattr(script, "hand_alias_to_children", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.delenv("AMPCOMPAT_KEEP_FP32", raising=False)
    monkeypatch.setattr("ampcompat.alias.install_as_apex", lambda force=False: False)
    return targets


def refusal(capsys, *line):
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["run", "--opt_level", "O2", "train.py"], "--opt-level"),
        (["run", "--optlevel=O2", "train.py"], "--opt-level"),
        (["run", "--keep-fp23", "a", "train.py"], "--keep-fp32"),
        (["run", "--explian", "train.py"], "--explain"),
        (["parity", "--opt-lvel", "O2", "train.py"], "--opt-level"),
        (["check", "--fromat", "json"], "--format"),
        (["migrate", "--wriet"], "--write"),
    ],
)
def test_an_unknown_option_is_answered_by_a_like_one(capsys, ran, line, meant):
    said = refusal(capsys, *line)
    assert said.startswith(f"ampcompat {line[0]}: error: unrecognized arguments: {line[1]}")
    assert said.endswith(f" - did you mean {meant}?")
    assert ran == []


def test_an_option_like_no_other_gets_no_suggestion(capsys):
    assert refusal(capsys, "run", "--qqq", "train.py").endswith("unrecognized arguments: --qqq")


def test_an_unknown_command_is_answered_by_a_like_one(capsys):
    said = refusal(capsys, "chek", "src")
    assert said.startswith("ampcompat: error: no command 'chek' - did you mean check? - commands: check, ")


@pytest.mark.parametrize("command", ["check", "env", "migrate", "parity", "run", "test"])
def test_the_help_of_a_command_begins_with_a_sentence(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    _, described, *_ = capsys.readouterr().out.split("\n\n")
    assert described[0].isupper()
    assert described.endswith((".", ")"))


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train.py --lr 1", "run train.py --lr 1"),
        ("-m package.train", "run -m package.train"),
        ("--opt-level=O2 train.py", "run --opt-level=O2 train.py"),
    ],
)
def test_a_line_without_a_command_is_answered_by_the_line_that_was_meant(capsys, ran, line, meant):
    assert refusal(capsys, *line.split()).endswith(f" - write: ampcompat {meant}")
    assert ran == []


@pytest.mark.parametrize("line", [["--report", "r.txt", "train.py"], ["--report", "old.json"]])
def test_a_reports_file_as_a_word_of_its_own_gets_a_hint(capsys, ran, line):
    said = refusal(capsys, "run", *line)
    file = line[1]
    assert said == f"ampcompat run: error: --report {file} - the file is a part of the option - write --report={file}"
    assert ran == []


@pytest.mark.parametrize("words", ["json", "first", "5"])
def test_words_of_explain_as_a_word_of_their_own_get_a_hint(capsys, ran, words):
    said = refusal(capsys, "run", "--explain", words, "train.py")
    assert said == (
        f"ampcompat run: error: --explain {words} - the word is a part of the option - write --explain={words}"
    )
    assert ran == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["run"], "no script given"),
        (["run", "-m"], "no script given"),
        (["run", "-c"], "no script given"),
        (["run", "--opt-level", "02", "train.py"], "Did you mean O2, with the letter O?"),
        (
            ["run", "--report=absent/r.txt", "train.py"],
            "--report='absent/r.txt' - its folder does not exist - name a file that can be written",
        ),
        (["run", "--report=.", "train.py"], "--report='.' - it is a folder - name a file that can be written"),
        (["run", "--explain=jsno", "train.py"], "it takes a number of faults, first or json"),
        (["run", "--explain=json,ranges", "train.py"], "it takes a number of faults, first or json"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_lines_are_refused_before_the_script_runs(capsys, ran, line, said):
    assert said in refusal(capsys, *line)
    assert ran == []


@pytest.mark.parametrize("patterns", ["", " ", ",", " , "])
def test_no_pattern_is_refused(capsys, ran, patterns):
    said = refusal(capsys, "run", "--keep-fp32", patterns, "train.py")
    assert said.endswith("it names no module - name some, such as 'decoder.*,head'")
    assert ran == []


@pytest.mark.parametrize("target", [["-c", "1 / 0", "--opt-level"], ["-m", "json.tool", "-"], ["train.py", "-c", "x"]])
def test_everything_from_the_target_on_is_the_scripts(ran, target, monkeypatch):
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", "")  # put back afterwards
    assert main(["run", "--opt-level", "O2", *target]) == 0
    assert ran == [target]


def test_a_report_that_cannot_be_written_is_refused_before_the_script_runs(capsys, ran, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "it is not allowed to be written - name a file" in refusal(capsys, "run", "--report=r.txt", "train.py")
    assert ran == []


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["check", "migrate", "parity", "test", "env"])
def test_ctrl_c_ends_a_command_with_one_line(capsys, monkeypatch, command):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"ampcompat.cli.{command}"), "main", interrupted)
    assert main([command]) == 130
    assert capsys.readouterr().err == f"ampcompat {command}: interrupted\n"


def test_ctrl_c_is_the_scripts_own_under_run(monkeypatch):
    def interrupted(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("ampcompat.cli.run"), "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["run", "train.py"])
