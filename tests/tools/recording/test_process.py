"""A recorded process is followed line by line, and ended with all that it started; without torch here."""

import os
import sys
import time
from pathlib import Path

import pytest

from ampcompat.tools.recording import process
from ampcompat.tools.recording.journal import Settings

ROOT = Path(__file__).parents[3]

WRITE = "import sys, subprocess, time\njournal = open(sys.argv[1], 'a', buffering=1)\n"


def follow(code, folder, must_end=lambda waited: False, on_line=None):
    lines = []
    status = process.follow(
        [sys.executable, "-S", "-c", WRITE + code, str(folder / "journal")],
        process.environment(seed=7, without=lambda name: name == "LEFT_OUT"),
        folder / "journal",
        folder / "log",
        on_line or (lambda *line: lines.append(line)),
        must_end,
        folder,
    )
    return status, lines


def test_lines_and_exit_status(tmp_path, monkeypatch):
    """A line that is written in two parts is one; the output and the folder are the process's own."""
    monkeypatch.setenv("LEFT_OUT", "1")
    status, lines = follow(
        """
journal.write('{"kind": "step", ')
journal.flush()
time.sleep(0.2)
journal.write('"skipped": false}\\n{"kind": "end", "error": null}\\n')
import os
print(os.getcwd(), os.environ.get("LEFT_OUT"), os.environ["PYTHONHASHSEED"])
sys.exit(3)
""",
        tmp_path,
    )
    assert (status, lines) == (3, [("step", {"skipped": False}), ("end", {"error": None})])
    assert (tmp_path / "log").read_text() == f"{tmp_path.resolve()} None 7\n"


STARTS_ANOTHER = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
journal.write('{"kind": "child", "pid": %d}\\n' % child.pid)
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
        on_line=lambda kind, content: children.append(content["pid"]),
    )
    assert status is None
    assert gone(children[0])


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    children = []

    def interrupt(kind, content):
        children.append(content["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(STARTS_ANOTHER, tmp_path, on_line=interrupt)
    assert gone(children[0])
    assert os.getpid() != children[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [({}, None), ({"no_apex": True}, "ModuleNotFoundError: No module named 'apex'")],
)
def test_what_a_recorded_script_may_import(tmp_path, monkeypatch, options, error):
    """ampcompat stands in for apex, unless the script is to do without."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "script.py").write_text("import apex")
    settings = Settings(str(tmp_path / "journal"), 1, 0, **options)
    ends = []
    process.follow(
        process.command(settings, ["script.py"]),
        process.environment(seed=0, without=lambda name: False),
        tmp_path / "journal",
        tmp_path / "log",
        lambda kind, content: ends.append(content["error"]) if kind == "end" else None,
        lambda waited: False,
        tmp_path,
    )
    assert ends == [error], (tmp_path / "log").read_text()
