"""What is left out of a copy of ``native_amp.py``, and when: a part that something needs is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from corpus import PATHS
from native_file import native_amp
from running import migrate_tree, write
from shapes import HEAD, SHAPES, TREES

import ampcompat
from ampcompat.cli import main
from ampcompat.tools.migrate.parts import PARTS, WHOLE, needed_by, parts_of, written

LOOP = """\
import torch
from apex import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer)
with amp.scale_loss(model(torch.ones(2)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
scheduler.step(1)
torch.save([model.state_dict(), optimizer.state_dict()], "x")
print(amp._amp_state.loss_scalers[0].loss_scale(), torch.nn.MSELoss(), F.mse_loss(x, y), self.head(x))
"""
NEEDS = {
    "amp.state_dict()": "checkpoints",
    "apex_amp.load_state_dict(saved['amp'])": "checkpoints",
    "from apex.amp import initialize, state_dict": "checkpoints",
    "if 'state_dict' in amp.__dict__: pass": "checkpoints",
    "from apex import amp as mixed_precision": "checkpoints",
    "from apex.amp import (\n    scale_loss,\n    state_dict,\n)": "checkpoints",
    "backend = amp": "checkpoints",
    "trainer = Trainer(model, amp)": "checkpoints",
    "parts = {'amp': amp}": "checkpoints",
    "backend = backend or amp  # either": "checkpoints",
    "def backend():\n    return amp": "checkpoints",
    "optimizer.step(compute)": "closures",
    "optimizer.step(closure=run)": "closures",
    "torch.optim.LBFGS(model.parameters())": "closures",
    "model = nn.DataParallel(model)": "data_parallel",
    "with amp.scale_loss(loss, optimizer, delay_unscale=True) as s: pass": "delayed_blocks",
    "with amp.scale_loss(loss, optimizer, delay_overflow_check=False) as s: pass": "delayed_blocks",
    "with model.no_sync(): pass": "delayed_blocks",
    "with amp.scale_loss(loss, optimizer, **options) as s: pass": "delayed_blocks",
    "with amp.scale_loss(loss, optimizer, 0, None, last) as s: pass": "delayed_blocks",
    "with amp.scale_loss(loss,\n                    optimizer, 0, None, last) as s: pass": "delayed_blocks",
    "block = amp.scale_loss(*given)": "delayed_blocks",
    "class Swish(torch.autograd.Function): pass": "explanations",
    "names = model.forward.__code__.co_varnames": "forward_attributes",
    "@amp.float_function": "functions",
    "amp.register_half_function(torch, 'einsum')": "functions",
    "with amp.disable_casts(): pass": "functions",
    "optimizer = FusedAdam(model.parameters())": "fused_checkpoints",
    "features.retain_grad()": "retained_gradients",
    "class Net(nn.Module):\n    def loss(self, x): pass": "unused_forwards",
    "loss = model.compute_loss(x)": "unused_forwards",
}


def corpus():
    """The sources of each program of the corpus."""
    scripts = [[path.read_text("utf-8")] for path in PATHS.values()]
    shapes = [[HEAD + code] for code in SHAPES.values()]
    return scripts + shapes + [list(files.values()) for _, files in TREES.values()]


#: The parts that some program needs, none, all, all but one, and one alone.
SUBSETS = {needed_by(texts) for texts in corpus()} | {frozenset(), PARTS}
SUBSETS |= {PARTS - {part} for part in PARTS} | {frozenset({part}) for part in PARTS}
SUBSETS = sorted(SUBSETS, key=sorted)


def test_each_part_has_a_begin_an_end_and_a_need():
    begun = None
    found = set()
    for line in WHOLE.read_text("utf-8").splitlines():
        mark = line.strip().removeprefix("# <").removesuffix(">")
        if not line.strip().startswith("# <"):
            continue
        if mark.startswith("/"):
            assert begun == mark[1:]
            begun = None
        else:
            assert begun is None
            begun = mark
            found |= set(mark.split(", "))
    assert begun is None
    assert found == PARTS


@pytest.mark.parametrize(("line", "part"), NEEDS.items())
def test_what_needs_a_part(line, part):
    assert part not in needed_by([LOOP])
    assert part in needed_by([LOOP, f"{line}\n"])


@pytest.mark.parametrize(
    "line",
    [
        '"""Train with data_parallel, or a closure."""',
        "# nn.DataParallel, retain_grad and delay_unscale are not used here",
        'class Net(nn.Module):\n    """Named like torch.autograd.Function."""',
        "from utils import *",
        "class AverageMeter(object):\n    def update(self, value): pass\n    def state_dict(self): pass",
        "class Average:\n    def update(self, value): pass",
        "with amp.scale_loss(\n    loss,\n    optimizer,\n) as scaled_loss: pass",
        "with amp.scale_loss(loss,\n                    optimizer) as scaled_loss: pass",
        "optimizer.step(\n)",
    ],
)
def test_what_needs_no_part(line):
    assert needed_by([f"{line}\n{LOOP}"]) == frozenset()


def test_a_plain_loop_needs_none_and_what_cannot_be_read_needs_all():
    assert needed_by([LOOP]) == frozenset()
    assert needed_by([LOOP, None]) == PARTS
    assert set(NEEDS.values()) == PARTS


@pytest.mark.parametrize("parts", SUBSETS, ids=lambda parts: ", ".join(sorted(parts)))
def test_a_copy_is_a_module_that_names_its_version_and_parts(parts):
    text = written(parts)
    assert f"Written by ampcompat {ampcompat.__version__}, with" in native_amp(parts).__doc__
    assert "# <" not in text
    assert parts_of(text) == parts
    assert parts_of(f"{text}x = 1\n") is None
    assert parts_of(text.replace(ampcompat.__version__, "0.0.1")) is None


def test_copies_are_clean(tmp_path):
    """No name is unknown or unused, in whatever copy."""
    ruff = shutil.which("ruff", path=Path(sys.executable).parent)
    if ruff is None:
        pytest.skip("ruff is not installed")
    for number, parts in enumerate(SUBSETS):
        (tmp_path / f"copy{number}.py").write_text(written(parts))
    options = ["--config", str(Path(ampcompat.__file__).parents[1] / "pyproject.toml")]
    for command in (["check", "--ignore", "T201,B905"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *options, tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_types_of_copies(tmp_path):
    pytest.importorskip("mypy")
    for number, parts in enumerate([frozenset(), *({part} for part in PARTS)]):
        (tmp_path / f"copy{number}.py").write_text(written(parts))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def changes(folder):
    """What migrating a folder would change; it is written."""
    made = {change.name: change.new for change in migrate_tree(folder, "native") if change.changed}
    for name, text in made.items():
        (folder / name).write_text(text)
    return made


def test_a_copy_gets_the_parts_that_are_needed_later(tmp_path):
    write(tmp_path, {"train.py": LOOP})
    assert changes(tmp_path)["native_amp.py"] == written(())
    assert changes(tmp_path) == {}
    write(tmp_path, {"other.py": LOOP + "optimizer.step(compute)\n"})
    assert changes(tmp_path)["native_amp.py"] == written({"closures"})
    write(tmp_path, {"other.py": "features.retain_grad()\n"})  # migrated code that changes
    assert changes(tmp_path) == {"native_amp.py": written({"closures", "retained_gradients"})}
    assert changes(tmp_path) == {}


def test_to_ampcompat_leaves_a_copy_as_it_is(tmp_path):
    write(tmp_path, {"train.py": LOOP})
    changes(tmp_path)
    write(tmp_path, {"other.py": "from apex import amp\nfeatures.retain_grad()\n"})
    assert [change.name for change in migrate_tree(tmp_path) if change.changed] == ["other.py"]


@pytest.mark.parametrize(
    "part", ["amp", "scale_loss(", "apex.amp", ".losses", "scale_loss(a, ", " def a", ".step(", "state_dict", "import "]
)
def test_a_hostile_text_is_searched_quickly(part):
    """Quadratic time would be minutes."""
    needed_by([part * (2**18 // len(part))])


def test_a_copy_that_was_changed_stays(tmp_path):
    write(tmp_path, {"train.py": LOOP})
    changes(tmp_path)
    copy = tmp_path / "native_amp.py"
    copy.write_text(copy.read_text() + "x = 1\n")
    assert [change.problem for change in migrate_tree(tmp_path, "native")] == [""] * 2
    write(tmp_path, {"other.py": LOOP})
    assert list(changes(tmp_path)) == ["other.py"]
    assert copy.read_text().endswith("x = 1\n")
    copy.write_text("x = 1\n")
    write(tmp_path, {"third.py": LOOP})
    with pytest.raises(FileExistsError, match=r"native_amp.py is there and is not what ampcompat writes"):
        changes(tmp_path)


def test_a_changed_copy_that_lacks_a_part_is_left_and_told(tmp_path, capsys):
    write(tmp_path, {"train.py": LOOP})
    changes(tmp_path)
    copy = tmp_path / "native_amp.py"
    mine = copy.read_text().replace(ampcompat.__version__, "0.1.9") + "x = 1\n"
    copy.write_text(mine)
    write(tmp_path, {"other.py": "features.retain_grad()\n"})
    assert main(["migrate", "--to", "native", "--write", str(tmp_path)]) == 1
    assert copy.read_text() == mine
    assert (
        "native_amp.py: was changed, or another version wrote it, and lacks what the code now needs: "
        "retained_gradients; " in capsys.readouterr().err
    )
    copy.write_text(mine.replace("uses: none.", "uses: retained_gradients."))
    assert main(["migrate", "--to", "native", "--write", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"train.py": LOOP}, ()),
        ({"train.py": LOOP, "helper.py": "features.retain_grad()\n"}, {"retained_gradients"}),
        ({"train.py": LOOP + "import helpers\n", "helpers/__init__.py": ""}, PARTS),
        ({"train.py": LOOP, "data/readme.py": "features.retain_grad()\n"}, ()),
    ],
)
def test_beside_a_single_file_its_neighbours_are_read(tmp_path, files, parts):
    write(tmp_path, files)
    (copy,) = [change for change in migrate_tree(tmp_path / "train.py", "native") if change.is_new]
    assert copy.new == written(parts)


def test_a_copy_outside_of_what_is_migrated_has_all_parts(tmp_path):
    write(tmp_path, {"p/__init__.py": "", "p/q/__init__.py": "from . import a\n", "p/q/a.py": LOOP})
    (copy,) = [change for change in migrate_tree(tmp_path / "p" / "q", "native") if change.is_new]
    assert (copy.name, copy.new) == ("../native_amp.py", written(PARTS))
