"""Any command line at all: it is carried out, or refused with status 2 and a message; never a traceback of ours."""

import contextlib
import io
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampcompat.cli import main, parity
from ampcompat.tools import script


class Launched(Exception):
    """The line was understood, and the script would run now."""


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    """The scripts that a line may name are not run, and what a line may write lies in an empty folder."""

    def launch(*_args, **_kwargs):
        raise Launched

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(script, "run", launch)
    monkeypatch.setattr(parity, "run_level", launch)
    (tmp_path / "there.py").write_text("from apex import amp\n")


OPTIONS = ["--opt-level", "--dtype", "--keep-fp32", "--explain", "--report", "--force"]  # of run and parity
OPTIONS += ["--steps", "--rtol", "--atol", "--timeout", "--out", "--device"]
OPTIONS += ["--all", "--format", "--to", "--write", "--check"]  # of check and migrate
VALUES = ["O1", "O9", "fp16", "bf16", "native", "ampcompat", "0", "-1", "1e309", "nan", "9" * 30, "", ",", "a,b", "**["]
PATHS = ["there.py", "missing.py", "there.py/below", ".", "/dev/null/x", "x" * 300, "\udcff.py", "-"]
WORDS = st.one_of(
    st.sampled_from([*OPTIONS, *VALUES, *PATHS, "-m", "-c", "--", "-h", "--version", "--help", "-", "--no-such"]),
    st.builds("{}={}".format, st.sampled_from(OPTIONS), st.sampled_from([*VALUES, *PATHS])),
    # What a process can be given; a path that leads out of the empty folder might be migrated.
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6).filter(
        lambda word: "/" not in word and word != ".."
    ),
)


def outcome(argv):
    """Exit status and what was shown; standard error escapes what it cannot show, as it does in a process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    environment = dict(os.environ)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except Launched:
            status = 0
        except SystemExit as end:
            status = end.code
        finally:
            os.environ.clear()
            os.environ.update(environment)
    return status, *(stream.buffer.getvalue().decode() for stream in (out, err) if not stream.flush())


quietly = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@quietly
@given(command=st.sampled_from(["run", "check", "migrate", "parity"]), words=st.lists(WORDS, max_size=6))
def test_every_line_is_carried_out_or_refused(command, words):
    status, out, err = outcome([command, *words])
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    if status == 2:
        assert out == ""
        assert "ampcompat" in err or "can't open file" in err


@settings(quietly, max_examples=50)
@given(words=st.lists(WORDS, max_size=4))
def test_every_line_without_a_command_is_refused_or_answered(words):
    status, _, err = outcome(words)
    assert status in (0, 2)
    assert "Traceback" not in err


# What the fuzzing above found.
@pytest.mark.parametrize("out", ["/dev/null/x", "there.py", "there.py/below", "x" * 300])
def test_a_folder_that_cannot_be_made_is_bad_usage(out):
    status, _, err = outcome(["parity", "--out", out, "there.py"])
    assert status == 2
    assert f"ampcompat parity: error: --out {out} - it is not a directory (" in err


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_an_empty_path_is_not_the_current_folder(command):
    """A shell's variable that is not set gives an empty path."""
    status, out, err = outcome([command, ""])
    assert (status, out) == (2, "")
    assert err == f"ampcompat {command}: '' does not exist; give a directory or a Python file\n"


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_terminal_escapes_in_a_path_are_shown_not_obeyed(command):
    status, out, err = outcome([command, "\x1b[31m\n"])
    assert (status, out) == (2, "")
    assert err == f"ampcompat {command}: \\x1b[31m\\n does not exist; give a directory or a Python file\n"
