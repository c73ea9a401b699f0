"""The command on directories that nobody vouches for: what it writes, where, and what it leaves alone."""

import argparse
import builtins
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampcompat.cli import migrate as command
from ampcompat.tools.migrate import change as change_module
from ampcompat.tools.migrate import migrate_source
from ampcompat.tools.migrate.tree import migrate_tree

OLD = b"from apex import amp\r\nx = 1  # \xc3\xa9"
NEW = b"from ampcompat import amp\r\nx = 1  # \xc3\xa9"
BYTES = st.one_of(st.binary(max_size=200), st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["migrate", *map(str, arguments)])
    return args.main(args), capsys.readouterr()


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


def test_write_does_not_follow_a_new_link(tmp_path):
    """A symbolic link that took the file's place after it was read is replaced."""
    outside, inside = tmp_path / "outside.py", tmp_path / "inside"
    inside.mkdir()
    outside.write_bytes(OLD)
    (inside / "a.py").write_bytes(OLD)
    (change,) = migrate_tree(inside)
    (inside / "a.py").unlink()
    (inside / "a.py").symlink_to(outside)
    change.write()
    assert outside.read_bytes() == OLD
    assert not (inside / "a.py").is_symlink()


def test_a_link_put_in_place_of_a_folder_is_not_followed(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for folder in (outside, inside / "package"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_bytes(OLD)
    (change,) = migrate_tree(inside)
    (inside / "package").rename(inside / "moved")
    (inside / "package").symlink_to(outside)
    with pytest.raises(OSError, match="became a link"):
        change.write()
    assert (outside / "a.py").read_bytes() == OLD
    assert os.listdir(outside) == ["a.py"]


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


def test_without_libcst_the_command_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.py").write_bytes(OLD)
    monkeypatch.setitem(sys.modules, "libcst", None)
    status, shown = run(capsys, tmp_path)
    assert status == 2
    assert "pip install 'ampcompat[migrate]'" in shown.err


def test_a_missing_path_is_bad_usage(tmp_path, capsys):
    assert run(capsys, tmp_path / "missing")[0] == 2


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=BYTES, to=st.sampled_from(["ampcompat", "native"]))
def test_arbitrary_bytes_never_raise(tmp_path, tail, to):
    (tmp_path / "a.py").write_bytes(b"from apex import amp\n" + tail)
    (change,) = migrate_tree(tmp_path, to)
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
    (change,) = migrate_tree(tmp_path, to)
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


def test_cells_that_need_no_change_stay_byte_for_byte(tmp_path):
    plain = '{"cell_type":"code",  "metadata":{}, "outputs":[],\n "source":["x = 1\\n",   "y = \\u00e9"]}'
    source = r"import torch\nfrom apex import amp\nm, o = amp.initialize(m, o)"
    amp = '{"cell_type":"code","metadata":{},"outputs":[],"source":"' + source + '"}'
    text = '{"cells":[' + plain + ",  " + amp + '],  "metadata":{},"nbformat":4,\n"nbformat_minor":5}'
    (tmp_path / "n.ipynb").write_text(text)
    (change,) = migrate_tree(tmp_path, "native")
    assert change.problem == ""
    before, after = text.split(amp)
    assert change.new.startswith(before)
    assert change.new.endswith(after)
    assert "mixed_precision(m)" in change.new


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


def written(folder, to, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for change in migrate_tree(folder, to):
        change.write()
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def test_files_of_a_folder_share_one_helper(tmp_path):
    files = written(tmp_path, "native", {"a.py": LOOP, "b.py": LOOP, "alone/c.py": LOOP})
    assert set(files) == {"a.py", "b.py", "alone/c.py", "mixed_precision.py"}
    assert "from mixed_precision import mixed_precision\n" in files["a.py"]
    assert "def mixed_precision" not in files["a.py"]
    assert files["a.py"] == files["b.py"]
    assert "def mixed_precision" in files["alone/c.py"]
    runs = [
        subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=True)
        for name in ("a.py", "alone/c.py")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert [change for change in migrate_tree(tmp_path, "native") if change.changed] == []


def test_modules_of_a_package_import_the_helper_relatively(tmp_path):
    relative = LOOP.replace("import torch\n", "import torch\nfrom . import other\n", 1)
    files = written(
        tmp_path,
        "native",
        {"p/__init__.py": "", "p/other.py": "", "p/a.py": relative, "p/b.py": relative, "p/c.py": LOOP},
    )
    assert "from .mixed_precision import mixed_precision\n" in files["p/a.py"]
    assert "def mixed_precision" in files["p/c.py"]  # it may be run as a script


MAKER = """\
import torch
from apex import amp

def train():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer)
    step(model, optimizer)
"""
STEP = """\
from torch.nn import functional
from apex import amp

def step(model, optimizer):
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("imports", "main"),
    [
        ("from .hooks import step", ""),
        ("from . import hooks", ""),
        ("from . import other", "from p import train\nfrom p.hooks import step\n"),
    ],
)
def test_a_module_that_others_import_is_in_its_package(tmp_path, imports, main):
    """It has no relative import of its own, and reaches the scaler of a module that trains by it."""
    files = {"p/__init__.py": "", "p/train.py": f"{imports}\n{MAKER}", "p/hooks.py": STEP, "main.py": main}
    new = written(tmp_path, "native", files)
    assert "from . import mixed_precision\n" in new["p/hooks.py"]
    assert "mixed_precision.scaler.step(optimizer)\n" in new["p/hooks.py"]
    assert "import torch\n" not in new["p/hooks.py"]
    assert "TODO" not in "".join(new.values())


def test_a_module_of_that_name_is_left_alone(tmp_path):
    files = written(tmp_path, "native", {"a.py": LOOP, "b.py": LOOP, "mixed_precision.py": "x = 1\n"})
    assert files["mixed_precision.py"] == "x = 1\n"
    assert "def mixed_precision" in files["a.py"]


def test_a_new_file_is_a_diff_that_patch_takes(tmp_path):
    (tmp_path / "a.py").write_text(LOOP)
    (tmp_path / "b.py").write_text(LOOP)
    changes = list(migrate_tree(tmp_path, "native"))
    diff = "".join(change.diff() for change in changes)
    subprocess.run(["patch", "-p1"], cwd=tmp_path, input=diff, text=True, check=True, capture_output=True)
    assert {c.name: (tmp_path / c.name).read_text() for c in changes} == {c.name: c.new for c in changes}


def test_files_without_a_name_of_apex_are_not_parsed(tmp_path, monkeypatch):
    import libcst

    (tmp_path / "a.py").write_text("import torch\nprint('no such name')\n")
    monkeypatch.setattr(libcst, "parse_module", None)
    assert [change.changed for change in migrate_tree(tmp_path, "native")] == [False]
