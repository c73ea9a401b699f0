"""``nox -f .ci/noxfile.py``: the built wheel is tested on each torch, with the lowest and the newest Python.

``-l`` lists the cells; ``-s "tests(python='3.10', torch='2.4.1')"`` takes one; what follows ``--`` goes to pytest. A
cell without its interpreter on PATH fails; the newest Python is the newest on PATH, and newer ones missed are named.
Each cell takes about 6 GB of disk where the index has the CUDA builds only; it is given back when the cell ends.

``-s release``: checks version, changelog and tag, and builds into ``dist/``.
"""

import re
import shutil
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent.parent
WHEEL = ROOT / ".nox" / "dist"


def pinned(file: str) -> str:
    """The torch of a file of constraints, the first where it has several."""
    return re.search(r"^torch==([\d.]+)", (ROOT / ".ci" / file).read_text(), re.MULTILINE)[1]


def runs(python: str) -> bool:
    """Whether ``pythonX.Y`` is on PATH and starts (a shim may be there without what it leads to)."""
    found = shutil.which(f"python{python}")
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0


OLDEST, PINNED, NEWEST = pinned("constraints-oldest.txt"), pinned("constraints.txt"), "newest"
LOWEST_PYTHON = "3.10"
# Newest first. torch publishes no wheels of old versions for new Pythons: 2.4.1 ends at 3.12, and 2.13.0 at 3.14.
PYTHONS = {
    OLDEST: ["3.12", "3.11"],
    PINNED: ["3.14", "3.13", "3.12", "3.11"],
    NEWEST: ["3.15", "3.14", "3.13", "3.12", "3.11"],
}
FOUND = {python for python in PYTHONS[NEWEST] if runs(python)}
CELLS = [(python, torch) for torch, pythons in PYTHONS.items() for python in [*pythons, LOWEST_PYTHON]]
BY_DEFAULT = [
    (python, torch)
    for torch, pythons in PYTHONS.items()
    for python in [LOWEST_PYTHON, next((p for p in pythons if p in FOUND), pythons[0])]
]

nox.options.envdir = str(ROOT / ".nox")
nox.options.error_on_missing_interpreters = True
nox.options.default_venv_backend = "venv"
nox.options.sessions = [f"tests(python='{python}', torch='{torch}')" for python, torch in BY_DEFAULT]


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel that every cell tests, once, and check it."""
    missed = [f"python{p}" for p in PYTHONS[NEWEST] if p > max(FOUND, default=LOWEST_PYTHON) and p != LOWEST_PYTHON]
    if missed:
        session.warn(f"not on PATH, so not tested: {', '.join(missed)}")
    session.install("-c", str(ROOT / ".ci" / "constraints.txt"), "build", "twine")
    shutil.rmtree(WHEEL, ignore_errors=True)
    with session.chdir(ROOT):
        session.run(".ci/build", str(WHEEL), "python", external=True)


@nox.session
def release(session: nox.Session) -> None:
    """Check that the tree is what the tag at its head says, and build into ``dist/``; ``-- v0.2.0`` gives the tag."""
    session.install("-c", str(ROOT / ".ci" / "constraints.txt"), "build", "twine")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    with session.chdir(ROOT):
        session.run("python", ".ci/check_release.py", *session.posargs)
        session.run(".ci/build", "dist", "python", external=True)


@nox.session(requires=["wheel"])
@nox.parametrize("python, torch", CELLS)
def tests(session: nox.Session, torch: str) -> None:
    """Install the wheel beside a torch, and run the tests in a folder that has no ``ampcompat`` of its own."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    tree = folder / "tree"
    copy_without_the_package(tree)
    pins = (ROOT / ".ci" / ("constraints-oldest.txt" if torch == OLDEST else "constraints.txt")).read_text()
    if torch == NEWEST:
        pins = re.sub(r"^(torch|numpy)==.*\n", "", pins, flags=re.MULTILINE)
    (folder / "constraints.txt").write_text(pins)
    (built,) = WHEEL.glob("*.whl")
    try:
        session.install("-c", str(folder / "constraints.txt"), f"{built}[test]", silent=True)
        with session.chdir(tree):
            session.run("python", "-c", PROOF, env={"PYTHONPATH": None})
            session.run("python", "-m", "pytest", *session.posargs, env={"PYTHONPATH": None})
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


PROOF = """
import sys, sysconfig, torch, ampcompat
print("torch", torch.__version__, "on Python", sys.version.split()[0], "with", ampcompat.__file__)
sys.exit(not ampcompat.__file__.startswith(sysconfig.get_path("purelib")))
"""


def copy_without_the_package(tree: Path) -> None:
    """Copy what git knows, except ``ampcompat/``: then ``import ampcompat`` can only find the installed wheel."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file() and not name.startswith("ampcompat/"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
