"""Colours where a terminal shows them and nowhere else."""

import io
import sys

import pytest

from ampcompat.cli import _emit, main

RED, GREEN, CYAN, OFF = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Standard output as a terminal, from here on: pytest puts its own there between a fixture and its test."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return sys.stdout


def test_a_terminal_shows_colours(monkeypatch):
    on_terminal(monkeypatch)
    assert _emit.painted("no", "red") == f"{RED}no{OFF}"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_unless_it_is_told_not_to(monkeypatch, name, value):
    on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert _emit.painted("no", "red") == "no"


def test_a_file_gets_none_unless_they_are_forced(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert _emit.painted("no", "red") == "no"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert _emit.painted("no", "red") == f"{RED}no{OFF}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _emit.painted("no", "red") == "no"


def test_verdicts_of_check_and_diffs_of_migrate(monkeypatch, tmp_path):
    terminal = on_terminal(monkeypatch)
    (tmp_path / "a.py").write_text("from apex import amp\nfrom apex.transformer import parallel_state\n")
    assert main(["check", "--all", str(tmp_path)]) == 1
    shown = terminal.getvalue()
    assert f"{RED}not supported" in shown
    assert f"{GREEN}works" in shown
    main(["migrate", str(tmp_path)])
    diff = terminal.getvalue()[len(shown) :]
    assert f"{RED}-from apex import amp{OFF}" in diff
    assert f"{GREEN}+from ampcompat import amp{OFF}" in diff
    assert f"{CYAN}@@" in diff
