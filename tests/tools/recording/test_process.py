"""A recorded process is followed line by line, and ended with all that it started; without torch here."""

import os
import sys
import time
from pathlib import Path

import pytest

from ampcompat.tools.recording import process

pytestmark = pytest.mark.torch

WRITE = "import sys, subprocess, time\njournal = open(sys.argv[1], 'a', buffering=1)\n"


def follow(code, folder, must_end=lambda waited: False, on_line=None):
    lines = []
    status = process.follow(
        [sys.executable, "-S", "-c", WRITE + code, str(folder / "journal")],
        process.environment({"CHANGED": "yes"}),
        folder / "journal",
        folder / "log",
        on_line or (lambda *line: lines.append(line)),
        must_end,
    )
    return status, lines


def test_lines_and_exit_status(tmp_path, monkeypatch):
    """A line that is written in two parts is one; the output is the process's own."""
    monkeypatch.setenv("CHANGED", "no")
    status, lines = follow(
        """
journal.write('{"kind": "step", ')
journal.flush()
time.sleep(0.2)
journal.write('"content": {"skipped": false}}\\n{"kind": "end", "content": {}}\\n')
import os
print(os.environ["CHANGED"], os.environ["PYTHONHASHSEED"])
sys.exit(3)
""",
        tmp_path,
    )
    assert (status, lines) == (3, [("step", {"skipped": False}), ("end", {})])
    assert (tmp_path / "log").read_text() == "yes 0\n"


STARTS_ANOTHER = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
journal.write('{"kind": "child", "content": %d}\\n' % child.pid)
time.sleep(60)
"""


def is_running(pid):
    """Whether it runs; one that has ended and waits for a parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid):
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def test_what_must_end_is_ended_with_what_it_started(tmp_path):
    children = []
    status, _ = follow(
        STARTS_ANOTHER,
        tmp_path,
        must_end=lambda waited: bool(children) and waited > 0.1,
        on_line=lambda kind, content: children.append(content),
    )
    assert status is None
    assert gone(children[0])


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    children = []

    def interrupt(kind, content):
        children.append(content)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(STARTS_ANOTHER, tmp_path, on_line=interrupt)
    assert gone(children[0])
    assert os.getpid() != children[0]
