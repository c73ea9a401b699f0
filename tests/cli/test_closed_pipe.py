"""Commands whose standard output nobody reads on, as in ``ampcompat migrate | head -1``."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a closed pipe is another error elsewhere")


def into_closed_pipe(tmp_path, *arguments):
    """Status and standard error of ``python *arguments`` in a folder, where nobody reads its output."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    return done.returncode, done.stderr


def test_migrate_ends_quietly(tmp_path):
    (tmp_path / "train.py").write_text("from apex import amp\n")
    status, errors = into_closed_pipe(tmp_path, "-m", "ampcompat", "migrate")
    assert (status, errors.splitlines()) == (
        0,
        ["1 of 1 file would change, 0 places need you", "next: ampcompat migrate --to ampcompat --write ."],
    )


def test_migrate_writes_every_file(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("from apex import amp\n")
    status, errors = into_closed_pipe(tmp_path, "-m", "ampcompat", "migrate", "--write")
    assert status == 0
    assert errors.startswith("2 of 2 files changed")
    assert [(tmp_path / name).read_text() for name in ("a.py", "b.py")] == ["from ampcompat import amp\n"] * 2


def test_check_ends_with_its_status(tmp_path):
    (tmp_path / "train.py").write_text("from apex import RNN\n")
    assert into_closed_pipe(tmp_path, "-m", "ampcompat", "check") == (1, "")


@pytest.mark.rotate(3)
@pytest.mark.parametrize("code", ["print('loss', flush=True)", "print('loss')", ""])
def test_a_script_with_a_report_ends_as_without(tmp_path, code):
    """What is printed is said to find no reader; the report is not."""
    (tmp_path / "train.py").write_text(code)
    expected = into_closed_pipe(tmp_path, "train.py")
    assert into_closed_pipe(tmp_path, "-m", "ampcompat", "run", "--report", "train.py") == expected
