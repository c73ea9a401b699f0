"""``migrate --verify``: scripts before and after, in processes of their own, and runs that must fail."""

import argparse
import re

import pytest
from legacy_shapes import HEAD
from legacy_shapes import RIGHT as SHAPES
from spread_shapes import RIGHT as SPREAD

from ampcompat.cli import main
from ampcompat.cli import migrate as command
from ampcompat.tools.migrate.tree import migrate_tree
from ampcompat.tools.migrate.verify import Options, Trace, copies, rewritten_near, run, verdict

SIMPLE = """\
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp


def train(steps=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Mixed precision from here on.
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # the usual level
    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    losses = []
    for _ in range(steps):
        output = model(x)  # forward
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()  # update
        losses.append(loss.item())
    return losses, {"amp": amp.state_dict()}


LOSSES, CHECKPOINT = train()
"""


def verified(tmp_path, code, to="native", edit=lambda text: text, steps=40):
    root = tmp_path / "root"
    root.mkdir()
    (root / "train.py").write_text(code)
    before, after = copies(root, list(migrate_tree(root, to)), tmp_path / "copies")
    (after / "train.py").write_text(edit((after / "train.py").read_text()))
    assert (root / "train.py").read_text() == code
    options = Options(["train.py"], steps=steps, timeout=240)
    one = run(before, options, tmp_path / "before.jsonl", imports="apex")
    other = run(after, options, tmp_path / "after.jsonl", imports="neither" if to == "native" else "ampcompat")
    return one, other, verdict(one, other)


@pytest.mark.slow  # test_the_command verifies one by default
@pytest.mark.parametrize("name", ["O2", "a switch", "lists of models and optimizers", "backward and step in methods"])
def test_what_is_right_passes(name, tmp_path):
    one, other, result = verified(tmp_path, HEAD + SHAPES[name])
    assert result.passed, "\n".join([*result.lines, other.output])
    assert len(one.steps) == len(other.steps) > 3
    assert one.losses


@pytest.mark.slow
def test_imports_alone_change_nothing(tmp_path):
    one, other, result = verified(tmp_path, SIMPLE, to="ampcompat", steps=4)
    assert result.passed
    assert [loss[:3] for loss in one.losses] == [loss[:3] for loss in other.losses]
    assert len(one.steps) == 4


BREAKS = {
    "step not scaled": (
        lambda s: s.replace("scaler.step(optimizer)", "optimizer.step()").replace("scaler.update()", "pass")
    ),
    "not unscaled": (
        lambda s: s.replace("scaler.unscale_(optimizer)", "pass").replace("1.0)", "1e9)").replace("lr=0.1", "lr=0.4")
    ),
    "float32": (lambda s: s.replace("mixed_precision(model)", "mixed_precision(model, dtype=torch.float32)")),
    "a name missing": (lambda s: s.replace("scaler = mixed", "scalar = mixed")),
    "apex needed": (lambda s: "import ampcompat\n" + s),
}


@pytest.mark.slow  # test_verdicts has each kind of difference
@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_seen(name, tmp_path):
    _, _, result = verified(tmp_path, SIMPLE, edit=BREAKS[name])
    assert not result.passed


def trace(losses=(1.0, 0.5), scale=4.0, dtypes=None, **more):
    numbered = [(loss, scale, "float32", number) for number, loss in enumerate(losses)]
    made = Trace(losses=numbered, steps=[(0, False)] * len(losses), dtypes=dtypes or {})
    return Trace(**{**made.__dict__, **more})


HALF, FULL = {("Linear", True): {"float16"}}, {("Linear", True): {"float32"}}


@pytest.mark.parametrize(
    ("after", "passed"),
    [
        (trace(), True),
        (trace((1.01, 0.505)), True),
        (trace((1.0, 0.7)), False),
        (trace((1.0,)), False),
        (trace((1.0, float("nan"))), False),
        (trace(scale=8.0), False),
        (trace(steps=[(0, False), (0, True)]), False),
        (trace(steps=[(0, False), (1, False)]), False),
        (trace(error="KeyError: 'x'"), False),
    ],
)
def test_verdicts(after, passed):
    result = verdict(trace(), after)
    assert result.passed == passed
    assert len(result.lines) >= 3


def test_products_must_keep_their_precision_and_norms_need_not():
    assert not verdict(trace(dtypes=HALF), trace(dtypes=FULL)).passed
    norm = [{("LayerNorm", True): {name}} for name in ("float32", "float16")]
    result = verdict(trace(dtypes=norm[0]), trace(dtypes=norm[1]))
    assert result.passed
    assert "no fault" in result.lines[-1]


def test_a_script_that_does_nothing_is_no_proof():
    assert not verdict(Trace(), Trace()).passed


@pytest.mark.parametrize("imports", ["apex", "neither"])
def test_a_run_that_does_not_end_is_ended(imports, tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    done = run(tmp_path, Options(["train.py"], timeout=0.1), tmp_path / "run.jsonl", imports)
    assert done.error == "no end after 0.1 s"


FIRST, *OTHERS = SPREAD


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(SPREAD[FIRST], id=FIRST),
        *(pytest.param(SPREAD[name], id=name, marks=pytest.mark.slow) for name in OTHERS),
        pytest.param({"train.py": SIMPLE}, id="one module", marks=pytest.mark.slow),
    ],
)
def test_the_command(files, tmp_path, capsys):
    """Code spread over modules is a migration of several files: what is right there trains like the original."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    status = main(["migrate", "--verify", "--to", "native", "--steps", "3", str(tmp_path), "--", "train.py"])
    shown = capsys.readouterr()
    assert status == 0, shown
    assert len([line for line in shown.out.splitlines() if line.endswith(" ok")]) == 3
    assert {name: (tmp_path / name).read_text() for name in files} == files


@pytest.mark.parametrize(
    "words",
    [["--verify"], ["--", "train.py"], ["--verify", "--write", "--", "a.py"], ["--verify", "--steps", "0", "--", "a"]],
)
def test_bad_usage(words, tmp_path, capsys):
    assert main(["migrate", str(tmp_path), *words]) == 2
    assert "ampcompat migrate:" in capsys.readouterr().err


def test_the_parser_knows_the_command():
    subparsers = argparse.ArgumentParser().add_subparsers()
    assert command.add_parser(subparsers).parse_args([]).paths == ["."]


BLOCKED = """\
try:
    __import__("{first}" + "{rest}")  # nothing that migrate knows
    RATE = 0.1
except ImportError:
    RATE = 1e4

"""


@pytest.mark.slow  # test_the_lines_that_were_rewritten_near_a_place has the message
@pytest.mark.parametrize("module", ["apex", "ampcompat"])
def test_the_message_names_the_step_and_what_was_rewritten(module, tmp_path, capsys):
    """The script learns at another rate where it cannot import the module: it could in the first run alone."""
    code = SIMPLE.replace("lr=0.1", "lr=RATE").replace(
        "def train", BLOCKED.format(first=module[:2], rest=module[2:]) + "def train"
    )
    (tmp_path / "train.py").write_text(code)
    status = main(["migrate", "--verify", "--to", "native", "--steps", "3", str(tmp_path), "--", "train.py"])
    shown = capsys.readouterr()
    assert status == 1, shown
    place = re.search(r"^step 2 strays first; it is made at train\.py:(\d+)$", shown.out, re.MULTILINE)
    assert place is not None, shown
    assert "  | +        scaler.step(optimizer)" in shown.out
    assert "NOT the same training" in shown.out


def test_the_lines_that_were_rewritten_near_a_place(tmp_path):
    (tmp_path / "train.py").write_text(SIMPLE)
    (change,) = migrate_tree(tmp_path, "native")
    lines = change.new.splitlines()
    step = next(number for number, line in enumerate(lines, 1) if "scaler.step(optimizer)" in line)
    near = rewritten_near([change], f"train.py:{step}")
    assert near[0].startswith("@@")
    assert any("scaler.step(optimizer)" in line for line in near)
    assert not any("under_autocast(plain" in line for line in near)
    assert rewritten_near([change], "other.py:1") == []
    assert rewritten_near([change], "") == []
