"""A file has the same findings whatever lies beside it, unless an import ties the two."""

import itertools

import pytest
from corpora import scripts, trees
from trap_corpus import FALSE, TRUE

from ampcompat.tools.check import scan
from ampcompat.tools.check.facts import Facts
from ampcompat.tools.check.findings import ERROR
from ampcompat.tools.check.judgement import judged
from ampcompat.tools.check.source import Source

HEAD = "import torch\nfrom apex import amp\n"
BLOCK = "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def initialized(level):
    return f"{HEAD}model, opt = amp.initialize(model, opt, opt_level={level})\n"


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


ENGINE = HEAD + "def step(model, opt, loss):\n" + "".join(f"    {line}\n" for line in (BLOCK + CLIP).splitlines())
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
    files["train.py"] += "from model import Net\n"
    assert traps(tmp_path, files) == {("model.py", "overflowing_fill"): "error"}


def test_a_plain_backward_pass_where_another_file_scales_losses(tmp_path):
    """It may be the loss of a model that amp has not got."""
    files = {"train.py": initialized('"O2"') + "loss.backward()\n", "engine.py": HEAD + BLOCK}
    assert traps(tmp_path, files) == {("train.py", "unscaled_backward"): "error"}
    files["train.py"] += "import engine\n"
    assert traps(tmp_path, files) == {("train.py", "unscaled_backward"): "warning"}


def test_the_calls_of_a_file_govern_it(tmp_path):
    clip = BLOCK + CLIP
    both = initialized('"O1"') + initialized('"O2"') + clip
    assert traps(tmp_path, {"a.py": both}) == {("a.py", "clip_of_model_params"): "warning"}
    files = {"a.py": initialized('"O1"') + clip, "b.py": "import a\n" + initialized('"O2"')}
    assert traps(tmp_path, files) == {}


# -- the corpora -------------------------------------------------------------------------------------------------------
def facts(files):
    """What is known of each file of a tree."""
    return {path: Facts.of(Source(path, code)) for path, code in files.items()}


REAL = {
    **{f"scripts/{name}": facts({f"scripts/{name}": code}) for name, code in scripts().items()},
    **{
        name: facts({f"trees/{number}/{path}": code for path, code in files.items() if path.endswith(".py")})
        for number, (name, files) in enumerate(trees().items())
    },
}
SNIPPETS = {
    f"snippets/{number}.py": facts({f"snippets/{number}.py": code})
    for number, code in enumerate([*FALSE.values(), *(code for _, code in TRUE.values())])
}
UNITS = {**REAL, **SNIPPETS}


def found_in(*units):
    """The traps in some units together, by path."""
    files = {path: known for unit in units for path, known in unit.items()}
    return dict(judged(files))


ALONE = {name: found_in(unit) for name, unit in UNITS.items()}


def has_suspects(name):
    return any(known.suspects for known in UNITS[name].values())


def test_in_pairs():
    pairs = [pair for pair in itertools.combinations(UNITS, 2) if any(map(has_suspects, pair))]
    assert pairs
    assert [
        (one, other) for one, other in pairs if found_in(UNITS[one], UNITS[other]) != {**ALONE[one], **ALONE[other]}
    ] == []


def test_all_together():
    alone = {path: findings for found in ALONE.values() for path, findings in found.items()}
    assert found_in(*UNITS.values()) == alone
    assert any(finding.level == ERROR for findings in alone.values() for finding in findings)


#: What the name says is a mistake, which `migrate` has to keep.
MISTAKEN = ("clip inside the block",)


@pytest.mark.parametrize("name", [name for name in REAL if name not in MISTAKEN])
def test_no_error_in_scripts_that_train_as_they_should(name):
    assert [f for findings in ALONE[name].values() for f in findings if f.level == ERROR] == []
