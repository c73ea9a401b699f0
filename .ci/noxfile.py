"""The version matrix: ``nox -f .ci/noxfile.py``. What is tested is the built wheel, not the tree.

Sessions for which no Python is installed are skipped. ``nox -f .ci/noxfile.py -l`` lists them; ``-k "2.4.1 and 3.12"``
takes some, ``-- -k scaler`` after it hands arguments to pytest.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent.parent
OLDEST = re.search(r"^torch==(.*)$", (ROOT / ".ci/constraints-oldest.txt").read_text(), re.MULTILINE)[1]
PINNED = re.search(r"^torch==(.*)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)[1]
NEWEST = "newest"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# torch publishes no wheels of old versions for new Pythons: 2.4.1 ends at 3.12.
PAIRS = [
    *[(python, OLDEST) for python in PYTHONS[:3]],
    *[(python, PINNED) for python in PYTHONS],
    *[(python, NEWEST) for python in PYTHONS],
]

nox.options.error_on_missing_interpreters = False


@nox.session(venv_backend="venv")
@nox.parametrize("python, torch", PAIRS)
def tests(session: nox.Session, torch: str) -> None:
    """Build the wheel, install it beside the given torch, and run the tests from a folder that has no ``ampcompat``."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    session.install("build")
    with session.chdir(ROOT):
        session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), silent=True)
    (wheel,) = folder.glob("*.whl")
    pins = (ROOT / ".ci" / ("constraints-oldest.txt" if torch == OLDEST else "constraints.txt")).read_text()
    if torch == NEWEST:
        pins = re.sub(r"^(torch|numpy)==.*\n", "", pins, flags=re.MULTILINE)
    (folder / "constraints.txt").write_text(pins)
    session.install("-c", str(folder / "constraints.txt"), f"{wheel}[test]")
    # A copy of what the tests read, without the package: ``import ampcompat`` can only find the installed wheel.
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file() and not name.startswith("ampcompat/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    os.environ.pop("PYTHONPATH", None)
    with session.chdir(folder):
        session.run("python", "-c", "import torch, ampcompat; print(torch.__version__, ampcompat.__file__)")
        session.run("python", "-m", "pytest", "-q", *session.posargs)
