"""The command on directories that nobody vouches for: what it writes, where, and what it leaves alone."""

import builtins
import json
import os
import re
import runpy
import shutil
import signal
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import imports, migrate_tree

from ampcompat.cli import main
from ampcompat.tools.migrate import change as change_module
from ampcompat.tools.migrate import migrate_source

OLD = b"from apex import amp\r\nx = 1  # \xc3\xa9"
NEW = b"from ampcompat import amp\r\nx = 1  # \xc3\xa9"
BYTES = st.one_of(st.binary(max_size=200), st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))


def run(capsys, *words):
    """The exit status of ``ampcompat migrate *words``, and what it printed."""
    status = main(["migrate", *map(str, words)])
    return status, capsys.readouterr()


def test_a_diff_by_default_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(OLD)
    status, shown = run(capsys, tmp_path)
    assert status == 0
    assert "--- a/a.py" in shown.out
    assert "+from ampcompat import amp" in shown.out
    assert (tmp_path / "a.py").read_bytes() == OLD


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_write_keeps_the_format_of_the_file(tmp_path, capsys, bom):
    """Line ends, byte-order mark and permissions stay, and a second run changes nothing."""
    file = tmp_path / "a.py"
    file.write_bytes(bom + OLD)
    file.chmod(0o755)
    assert run(capsys, tmp_path, "--write")[0] == 0
    assert file.read_bytes() == bom + NEW
    assert file.stat().st_mode & 0o777 == 0o755
    assert os.listdir(tmp_path) == ["a.py"]
    status, shown = run(capsys, tmp_path, "--write")
    assert (status, shown.out) == (0, "")


def test_declared_charsets_are_kept(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nfrom apex import amp  # é\n".encode("latin-1"))
    run(capsys, tmp_path, "--write")
    assert (tmp_path / "a.py").read_bytes() == "# coding: latin-1\nfrom ampcompat import amp  # é\n".encode("latin-1")


def test_what_is_left_is_listed_and_sets_the_status(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import apex.RNN\n")
    (tmp_path / "b.py").write_text("import apex\nprint 'old'\n")
    status, shown = run(capsys, tmp_path)
    assert status == 1
    assert "a.py:1: apex.RNN is not provided" in shown.err
    assert "b.py: cannot be parsed" in shown.err


def test_a_file_in_which_nothing_changes_has_its_notes(tmp_path, capsys):
    (tmp_path / "a.py").write_text("from timm.utils import *\nloss_scaler = ApexScaler()\n")
    status, shown = run(capsys, tmp_path)
    assert status == 0
    assert "a.py:2: note: timm.ApexScaler: " in shown.err
    assert "0 of 1 file would change, 0 places need you" in shown.err


def test_notes_of_a_manifest_have_the_lines_of_the_new_text(tmp_path, capsys):
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='x', install_requires=['apex'])\n"
        "from timm.utils import *\nloss_scaler = ApexScaler()\n"
    )
    shown = run(capsys, tmp_path)[1].err
    assert "setup.py:2: apex is not needed any more" in shown
    assert "setup.py:5: note: timm.ApexScaler: " in shown


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import apex.RNN\n", "1 of 1 file would change, 1 place needs you"),
        ("import apex.RNN\nimport apex.pyprof\n", "1 of 1 file would change, 2 places need you"),
        ("from apex import amp\n", "1 of 1 file would change, 0 places need you"),
    ],
)
def test_the_summary_is_plain_english(code, said, tmp_path, capsys):
    (tmp_path / "a.py").write_text(code)
    assert said in run(capsys, tmp_path)[1].err


def test_check_lists_what_would_change_and_sets_the_status(tmp_path, capsys):
    file = tmp_path / "a.py"
    file.write_bytes(OLD)
    (tmp_path / "b.py").write_text("x = 1\n")
    status, shown = run(capsys, tmp_path, "--check")
    assert (status, shown.out, file.read_bytes()) == (1, "a.py\n", OLD)
    run(capsys, tmp_path, "--write")
    assert run(capsys, tmp_path, "--check")[:1] == (0,)
    with pytest.raises(SystemExit):
        run(capsys, tmp_path, "--check", "--write")


def test_the_diff_shows_the_copied_file_as_one_line(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(OLD)
    shown = run(capsys, tmp_path, "--to", "native")[1].out
    assert re.fullmatch(r"\+ native_amp.py, \d+ lines", shown.splitlines()[-1])
    assert "def scale_loss" not in shown


def test_links_are_neither_read_nor_written(tmp_path, capsys):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "a.py").write_bytes(OLD)
    (inside / "link.py").symlink_to(outside / "a.py")
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    os.mkfifo(inside / "pipe.py")
    status, shown = run(capsys, inside, "--write")
    assert "pipe.py: the file is not a plain file" in shown.err
    assert (outside / "a.py").read_bytes() == OLD
    assert (inside / "link.py").is_symlink()


def test_a_failed_write_leaves_the_file_and_no_litter(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.py").write_bytes(OLD)

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(change_module.os, "replace", refuse)
    status, shown = run(capsys, tmp_path, "--write")
    assert status == 2
    assert "No space left" in shown.err
    assert os.listdir(tmp_path) == ["a.py"]
    assert (tmp_path / "a.py").read_bytes() == OLD


def test_a_missing_path_is_bad_usage(tmp_path, capsys):
    assert run(capsys, tmp_path / "missing")[0] == 2


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=BYTES, to=st.sampled_from(["ampcompat", "native"]))
def test_arbitrary_bytes_never_raise(tmp_path, tail, to):
    (tmp_path / "a.py").write_bytes(b"from apex import amp\n" + tail)
    change, *_ = migrate_tree(tmp_path, to)
    assert change.problem or change.changed


DEEP = {
    "sums": "x = 1" + "+1" * 900,
    "more sums": "x = 1" + "+1" * 50_000,
    "attributes": "x = a" + ".b" * 900,
    "calls": "x = f" + "()" * 900,
    "parentheses": "x = " + "(" * 150 + "1" + ")" * 150,
    "blocks": "".join(" " * i + "if x:\n" for i in range(90)) + " " * 90 + "pass",
    "unary": "x = " + "-" * 900 + "1",
    "elif": "if x:\n    pass\n" + "elif x:\n    pass\n" * 900,
}


@pytest.mark.parametrize("to", ["ampcompat", "native"])
@pytest.mark.parametrize("name", sorted(DEEP))
def test_deep_sources_are_rewritten_or_reported(tmp_path, name, to):
    (tmp_path / "a.py").write_text(f"from apex import amp\n{DEEP[name]}\n")
    change, *_ = migrate_tree(tmp_path, to)
    assert change.problem or change.changed


def test_nothing_that_is_read_is_run(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("executed")

    monkeypatch.setattr(builtins, "exec", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    mark = tmp_path / "ran"
    migrate_source(f"from apex import amp\nopen({str(mark)!r}, 'w')\n", "native")
    assert not mark.exists()


def test_an_interrupted_write_ends_after_a_whole_file(tmp_path, capsys, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.py").write_bytes(OLD)
    replace = os.replace

    def interrupted(source, target):
        os.kill(os.getpid(), signal.SIGINT)
        replace(source, target)

    monkeypatch.setattr(change_module.os, "replace", interrupted)
    status, shown = run(capsys, tmp_path, "--write")
    assert status == 130
    assert shown.out.splitlines() == ["rewrote a.py"]
    assert "interrupted: 1 of 3 files are written" in shown.err
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py", "c.py"]
    assert [(tmp_path / f"{name}.py").read_bytes() for name in "abc"] == [NEW, OLD, OLD]


@pytest.mark.parametrize(
    ("to", "said"),
    [("ampcompat", "call ampcompat.install_as_apex() in it"), ("native", "put native_amp.py next to it")],
)
def test_a_notebook_is_left_alone_and_named(to, said, tmp_path, capsys):
    cell = {"cell_type": "code", "source": "import apex"}
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": [cell]}))
    (tmp_path / "other.ipynb").write_text(json.dumps({"cells": [{**cell, "source": "import torch"}]}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, shown = run(capsys, tmp_path, "--to", to, "--write")
    assert status == 1
    assert "n.ipynb: is a notebook, and left alone: " in shown.err
    assert said in shown.err
    assert "other.ipynb" not in shown.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


LOOP = """\
import torch
from apex import amp

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer)
with amp.scale_loss(model(torch.ones(2)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
print(model.weight.tolist())
"""


def migrated(folder, files):
    """Write the files of a tree, migrate it, and return the new ones; a second run changes nothing."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for change in migrate_tree(folder, "native"):
        change.write()
    assert [change.name for change in migrate_tree(folder, "native") if change.changed] == []
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def copies(files):
    return {name for name in files if name.endswith("native_amp.py")}


def test_one_copy_for_each_folder_of_scripts(tmp_path):
    files = migrated(tmp_path, {"a.py": LOOP, "b.py": LOOP, "other/c.py": LOOP})
    assert copies(files) == {"native_amp.py", "other/native_amp.py"}
    assert files["a.py"] == files["b.py"] == files["other/c.py"] == LOOP.replace(*AMP)
    for name in ("a.py", "other/c.py"):
        run_alone(tmp_path, name)


AMP = ("from apex import amp\n", "import native_amp as amp\n")
IN_PACKAGE = ("from apex import amp\n", "from p import native_amp as amp\n")


def run_alone(folder, name):
    """Run a script by its path, where neither apex nor ampcompat can be imported."""
    script = folder / name
    with imports(script.parent, apex=False):
        runpy.run_path(str(script), run_name="__main__")


def test_modules_of_a_package_share_the_copy_in_its_top(tmp_path):
    files = migrated(
        tmp_path,
        {
            "p/__init__.py": "",
            "p/q/__init__.py": "from . import a\n",
            "p/q/a.py": LOOP,
            "p/b.py": "from .q import a\n" + LOOP,
            "train.py": "import p.b\n" + LOOP,
        },
    )
    assert copies(files) == {"p/native_amp.py"}
    (tmp_path / "p" / "native_amp.py").unlink()
    for name in ("p/q/a.py", "p/b.py", "train.py"):
        (tmp_path / name).write_text(files[name].replace(*reversed(IN_PACKAGE)))
    assert [change.name for change in migrate_tree(tmp_path, "native") if change.is_new] == ["p/native_amp.py"]
    assert [c.name for c in migrate_tree(tmp_path / "p" / "q", "native") if c.is_new] == ["../native_amp.py"]
    migrated(tmp_path, {})
    for name in ("p/q/a.py", "p/b.py", "train.py"):
        assert IN_PACKAGE[1] in files[name]
    run_alone(tmp_path, "train.py")


def test_a_script_that_is_migrated_later_shares_the_copy_that_is_there(tmp_path):
    migrated(tmp_path, {"p/__init__.py": "", "p/a.py": "from . import x\n" + LOOP, "p/x.py": ""})
    files = migrated(tmp_path, {"train.py": "import p.a\n" + LOOP})
    assert copies(files) == {"p/native_amp.py"}
    assert IN_PACKAGE[1] in files["train.py"]


def test_packages_beside_each_other_share_one_copy_beside_them(tmp_path):
    files = migrated(
        tmp_path,
        {
            "p/__init__.py": "",
            "p/a.py": "from . import x\n" + LOOP,
            "p/x.py": "",
            "q/__init__.py": "",
            "q/b.py": "from p import x\nfrom . import y\n" + LOOP,
            "q/y.py": "",
            "train.py": "import p.a, q.b\n" + LOOP,
        },
    )
    assert copies(files) == {"native_amp.py"}
    assert all(f"\n{AMP[1]}" in files[name] for name in ("p/a.py", "q/b.py", "train.py"))
    run_alone(tmp_path, "train.py")


@pytest.mark.parametrize("imports", ["import engine\n", ""])
def test_a_script_in_a_folder_with_an_init(tmp_path, imports):
    """It is run by its path: it imports what stands beside it by a bare name, or nothing imports it."""
    files = migrated(tmp_path, {"p/__init__.py": "", "p/engine.py": "", "p/train.py": imports + LOOP})
    assert copies(files) == {"p/native_amp.py"}
    assert f"\n{AMP[1]}" in files["p/train.py"]
    run_alone(tmp_path, "p/train.py")


def test_a_script_in_a_subfolder_shares_the_copy_of_the_package_that_it_imports(tmp_path):
    files = {"p/__init__.py": "from .a import x\n", "p/a.py": "x = 1\n" + LOOP, "tools/train.py": "import p\n" + LOOP}
    new = migrated(tmp_path, files)
    assert copies(new) == {"p/native_amp.py"}
    assert IN_PACKAGE[1] in new["tools/train.py"]


MAIN = 'if __name__ == "__main__":\n    pass\n'


def test_scripts_of_which_one_is_imported_by_another_find_their_copies(tmp_path):
    """A collection of examples: each is run from its own folder, and one also imports a module of another."""
    files = {
        "PyTorch/detection/train.py": LOOP + MAIN,
        "PyTorch/language/train.py": LOOP + MAIN,
        "PyTorch/language/other.py": LOOP,
        "run_all.py": "import PyTorch.language.train\n",
    }
    new = migrated(tmp_path, files)
    for name in ("PyTorch/detection/train.py", "PyTorch/language/train.py", "PyTorch/language/other.py", "run_all.py"):
        run_alone(tmp_path, name)
    assert copies(new) == {"native_amp.py", "PyTorch/detection/native_amp.py", "PyTorch/language/native_amp.py"}


def test_packages_that_a_collection_imports_too_find_their_copies(tmp_path):
    """Each project is run from its own folder; one has the folder names of another, without ``__init__.py``."""
    files = {
        "hub.py": "from PyTorch.ssd import entry\n",
        "PyTorch/__init__.py": "",
        "PyTorch/ssd/__init__.py": "",
        "PyTorch/ssd/entry.py": "",
        "PyTorch/ssd/train.py": LOOP,
        "PyTorch/main.py": "from ssd import train\n",
        "translate/run.py": "from seq.train import trainer\n",
        "translate/seq/train/trainer.py": LOOP,
        "other/run.py": "from train.trainer import fit\n",
        "other/train/trainer.py": "fit = None\n",
    }
    new = migrated(tmp_path, files)
    assert copies(new) == {"PyTorch/ssd/native_amp.py", "translate/native_amp.py"}
    run_alone(tmp_path, "PyTorch/main.py")
    run_alone(tmp_path, "translate/run.py")


def test_modules_of_a_package_without_an_init_share_the_copy_beside_it(tmp_path):
    files = {
        "p/a.py": LOOP,
        "p/b.py": "from . import a\n" + LOOP,
        "p/q/c.py": LOOP,
        "train.py": "import p.b, p.q.c\n" + LOOP,
    }
    new = migrated(tmp_path, files)
    assert copies(new) == {"native_amp.py"}
    run_alone(tmp_path, "train.py")


def test_parts_of_a_library_that_nothing_in_the_tree_imports(tmp_path):
    files = {
        "p/__init__.py": LOOP,
        "p/command.py": "from . import x\n" + LOOP,
        "p/x.py": "",
        "p/a.py": "import p\n" + LOOP,
    }
    new = migrated(tmp_path, files)
    assert copies(new) == {"p/native_amp.py"}
    assert all(IN_PACKAGE[1] in new[name] for name in ("p/__init__.py", "p/command.py", "p/a.py"))


def test_folders_within_a_package_share_its_copy(tmp_path):
    """A folder without ``__init__.py`` in one that has it."""
    files = {
        "src/__init__.py": "",
        "src/utils/save.py": LOOP,
        "src/tasks/run.py": "from src.utils.save import model\n" + LOOP,
    }
    new = migrated(tmp_path, files)
    assert copies(new) == {"src/native_amp.py"}
    assert "from src import native_amp as amp" in new["src/tasks/run.py"]


def test_a_file_of_that_name_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "a.py").write_text(LOOP)
    (tmp_path / "native_amp.py").write_text("x = 1\n")
    status, shown = run(capsys, tmp_path, "--to", "native", "--write")
    assert status == 2
    assert "native_amp.py is there and is not what ampcompat writes" in shown.err
    assert (tmp_path / "a.py").read_text() == LOOP
    assert (tmp_path / "native_amp.py").read_text() == "x = 1\n"


def test_a_copy_that_was_changed_stays_and_is_noted(tmp_path, capsys):
    migrated(tmp_path, {"a.py": LOOP})
    copy = tmp_path / "native_amp.py"
    copy.write_text(copy.read_text() + "x = 1\n")
    (tmp_path / "b.py").write_text(LOOP)
    status, shown = run(capsys, tmp_path, "--to", "native", "--write")
    assert status == 0
    assert "native_amp.py:1: note: it was changed, or another version of ampcompat wrote it; it stays" in shown.err
    assert copy.read_text().endswith("x = 1\n")


def test_a_single_file_gets_its_copy_beside_it(tmp_path, capsys):
    (tmp_path / "a.py").write_text(LOOP)
    (tmp_path / "b.py").write_text(LOOP)
    status, shown = run(capsys, tmp_path / "a.py", "--to", "native", "--write")
    assert (status, shown.out) == (0, "rewrote a.py\nwrote native_amp.py\n")
    assert (tmp_path / "b.py").read_text() == LOOP


def test_marks_are_looked_for_only_where_there_are_some(tmp_path, capsys):
    (tmp_path / "old.py").write_text("from apex import amp\nprint 'loss'\n")
    status, shown = run(capsys, tmp_path, "--write")
    assert status == 1
    assert "old.py: cannot be parsed" in shown.err
    assert "grep" not in shown.err
    (tmp_path / "new.py").write_text("from apex import RNN\nRNN.LSTM(4)\n")
    assert "grep -rn 'TODO(ampcompat)'" in run(capsys, tmp_path, "--write")[1].err


CHECKOUT = "no package index has ampcompat: install it from a checkout (pip install PATH)"
NOT_NEEDED = "apex is not needed any more: "


def test_a_requirement_says_how_ampcompat_is_installed(tmp_path, capsys):
    (tmp_path / "requirements").mkdir()
    file = tmp_path / "requirements" / "train.txt"
    file.write_text("torch\napex>=0.1\n")
    status, shown = run(capsys, tmp_path, "--write")
    assert status == 1
    assert shown.err.splitlines()[0] == f"requirements/train.txt:2: {CHECKOUT}"
    assert file.read_text() == f"torch\n# TODO(ampcompat): {CHECKOUT}\nampcompat\n"
    run(capsys, tmp_path, "--write")
    assert file.read_text() == f"torch\n# TODO(ampcompat): {CHECKOUT}\nampcompat\n"


MARKED = {
    "setup.py": (
        "from setuptools import setup\nsetup(\n    install_requires=[\n        'apex',\n    ],\n)\n",
        "from setuptools import setup\nsetup(\n    install_requires=[\n        MARK\n        'apex',\n    ],\n)\n",
    ),
    "pyproject.toml": ('[project]\ndependencies = ["apex"]\n', '[project]\nMARK\ndependencies = ["apex"]\n'),
    "Pipfile": ('[packages]\napex = "*"\n', '[packages]\nMARK\napex = "*"\n'),
    "environment.yml": ("dependencies:\n  - apex\n", "dependencies:\n  MARK\n  - apex\n"),
    "install.sh": ("pip install \\\n    torch \\\n    apex\n", "MARK\npip install \\\n    torch \\\n    apex\n"),
    "Dockerfile": ("RUN pip install \\\n    apex\n", "MARK\nRUN pip install \\\n    apex\n"),
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize(("to", "instead"), [("ampcompat", CHECKOUT), ("native", "nothing takes its place")])
def test_a_manifest_is_marked_once(name, to, instead, tmp_path, capsys):
    before, after = MARKED[name]
    (tmp_path / name).write_text(before)
    for _ in range(2):
        status, shown = run(capsys, tmp_path, "--to", to, "--write")
        assert status == 1
        assert NOT_NEEDED + instead in shown.err
        assert (tmp_path / name).read_text() == after.replace("MARK", f"# TODO(ampcompat): {NOT_NEEDED}{instead}")


def test_requirements_lose_apex(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\napex\n")
    (change,) = migrate_tree(tmp_path, "native")
    assert change.new == "torch\n"


@pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")
def test_a_new_file_is_a_diff_that_patch_takes(tmp_path):
    (tmp_path / "a.py").write_text(LOOP)
    changes = list(migrate_tree(tmp_path, "native"))
    assert [change.name for change in changes] == ["a.py", "native_amp.py"]
    diff = "".join(change.diff() for change in changes)
    subprocess.run(["patch", "-p1"], cwd=tmp_path, input=diff, text=True, check=True, capture_output=True)
    assert {c.name: (tmp_path / c.name).read_text() for c in changes} == {c.name: c.new for c in changes}


def test_files_without_a_name_of_apex_are_not_parsed(tmp_path):
    (tmp_path / "a.py").write_text("import torch\nprint 'no such syntax'\n")
    assert [(change.changed, change.problem) for change in migrate_tree(tmp_path, "native")] == [(False, "")]


def test_an_argument_of_a_class_of_the_program_is_no_librarys(tmp_path):
    (tmp_path / "finder").mkdir()
    (tmp_path / "finder" / "__init__.py").write_text("from apex import amp\nclass LRFinder: pass\n")
    use = "from apex import amp\nfrom {} import LRFinder\nLRFinder(amp_backend='apex')\n"
    (tmp_path / "finder" / "near.py").write_text(use.format("."))
    (tmp_path / "use.py").write_text(use.format("finder"))
    (tmp_path / "other.py").write_text(use.format("torch_lr_finder"))
    changes = {change.name: change for change in migrate_tree(tmp_path, "native")}
    assert changes["use.py"].todos == []
    assert changes["finder/near.py"].todos == []
    assert [message.partition(":")[0] for _, message in changes["other.py"].todos] == ["amp_backend"]


def test_a_folder_that_is_no_package_is_no_module_of_the_program(tmp_path):
    """A script that lies in a folder called as a library is."""
    folder = tmp_path / "lightning"
    folder.mkdir()
    code = "from apex import amp\nimport lightning\nlightning.Trainer(amp_backend='apex')\n"
    (folder / "train.py").write_text(code)
    (change,) = [one for one in migrate_tree(folder, "native") if one.name == "train.py"]
    assert [message.partition(":")[0] for _, message in change.todos] == ["amp_backend"]
