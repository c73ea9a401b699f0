"""A file has the same findings whatever lies beside it, unless an import ties the two."""

import pytest
from healthy_scripts import scripts, trees
from rule_examples import BLOCK, CLIP, INIT, START

from ampcompat.tools.check import scan, scan_source
from ampcompat.tools.check.findings import ERROR


def initialized(level):
    return START + INIT.format(level)


def traps(folder, files):
    """The level of each trap, by file and name."""
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    return {(f.path, f.name): f.level for f in scan(folder).findings if f.kind == "trap"}


def test_literal_levels_side_by_side(tmp_path):
    files = {f"train_o{n}.py": initialized(f'"O{n}"') + BLOCK + CLIP for n in (1, 2)}
    files["main.py"] = "import argparse\n" + initialized("args.opt_level")
    assert traps(tmp_path, files) == {("train_o2.py", "clip_of_model_params"): "error"}


ENGINE = START + "def step(model, opt, loss):\n" + "".join(f"    {line}\n" for line in (BLOCK + CLIP).splitlines())
FILL = "import torch\ny = torch.bmm(a, b).masked_fill(mask, -1e9)\n"


@pytest.mark.parametrize(
    ("beside", "level"),
    [
        ({}, "warning"),
        ({"train.py": initialized('"O2"')}, "warning"),
        ({"train.py": "from engine import step\n" + initialized('"O2"')}, "error"),
        ({"train.py": "from engine import step\n" + initialized('"O1"')}, None),
        ({"train.py": "from engine import step\n" + initialized('"O2"'), "b.py": initialized('"O1"')}, "error"),
        ({f"train{n}.py": "import engine\n" + initialized(f'"O{n}"') for n in (1, 2)}, "warning"),
        ({"train.py": "import loops\n" + initialized('"O2"'), "loops.py": "from engine import *\n"}, "error"),
    ],
)
def test_a_loop_has_the_level_of_what_imports_it(beside, level, tmp_path):
    found = traps(tmp_path, {"engine.py": ENGINE, **beside})
    assert found == ({("engine.py", "clip_of_model_params"): level} if level else {})


@pytest.mark.parametrize(
    ("importing", "module"),
    [
        ("from . import engine\n", "package/engine.py"),
        ("from .engine import step\n", "package/engine.py"),
        ("from ..engine import step\n", "engine.py"),
        ("from package.parts.engine import step\n", "package/parts/engine.py"),
        ("import package.parts\n", "package/parts/__init__.py"),
        ("from package import parts\n", "package/parts/__init__.py"),
        ("from package.parts import step\n", "package/parts/__init__.py"),
    ],
)
def test_what_an_import_leads_to(importing, module, tmp_path):
    found = traps(tmp_path, {module: ENGINE, "package/train.py": importing + initialized('"O2"')})
    assert found == {(module, "clip_of_model_params"): "error"}


def test_a_loop_has_the_level_of_what_it_imports(tmp_path):
    files = {"setup_amp.py": initialized('"O2"'), "engine.py": f"import setup_amp\n{ENGINE}"}
    assert traps(tmp_path, files) == {("engine.py", "clip_of_model_params"): "error"}


def test_a_model_is_searched_in_a_program_that_uses_amp(tmp_path):
    files = {"model.py": FILL, "train.py": initialized('"O1"')}
    assert traps(tmp_path, files) == {}
    files["main.py"] = "from model import Net\nfrom train import train\n"
    assert traps(tmp_path, files) == {("model.py", "overflowing_fill"): "warning"}


def test_the_calls_of_a_file_govern_it(tmp_path):
    clip = BLOCK + CLIP
    both = initialized('"O1"') + initialized('"O2"') + clip
    assert traps(tmp_path, {"a.py": both}) == {("a.py", "clip_of_model_params"): "warning"}
    files = {"a.py": initialized('"O1"') + clip, "b.py": "import a\n" + initialized('"O2"')}
    assert traps(tmp_path, files) == {}


#: What the name says is a mistake, which `migrate` has to keep.
MISTAKEN = ("clip inside the block",)
REAL = {**{f"scripts/{name}": {name: code} for name, code in scripts().items()}, **trees()}


@pytest.mark.parametrize("name", [name for name in REAL if name not in MISTAKEN])
def test_no_error_in_scripts_that_train_as_they_should(name):
    found = [finding for path, code in REAL[name].items() if path.endswith(".py") for finding in scan_source(code)]
    assert [finding for finding in found if finding.level == ERROR] == []
