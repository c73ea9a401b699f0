"""The level that a finding has: of the table of levels, and of the arguments of ``initialize``."""

import re

import pytest
import torch

from ampcompat.amp import levels as table
from ampcompat.tools.check import initializations, scan_source
from ampcompat.tools.level_table import LEVELS, TABLE, Level, read_levels

HEAD = "import argparse, torch\nfrom apex import amp\n"
PARSER = "parser = argparse.ArgumentParser()\n"
LOOP = """
with amp.scale_loss(loss, opt) as scaled:
    scaled.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def name_of(dtype):
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", table.LEVELS)
def test_the_table_is_read_as_it_is(name):
    row = table.LEVELS[name]
    assert LEVELS[name] == Level(
        name_of(row.cast_model_type),
        name_of(row.patch_torch_functions_type),
        bool(row.master_weights),
        row.loss_scale,
    )


def test_every_level_is_read():
    assert list(LEVELS) == list(table.LEVELS)
    assert any(row.cast_model_type is torch.bfloat16 for row in table.LEVELS.values())


@pytest.fixture
def new_row(monkeypatch):
    """A level O6, with masters and a static scale, as a row of the table makes it."""
    code = TABLE.read_text("utf-8")
    weights = "cast_model_type=torch.bfloat16, patch_torch_functions=False, patch_torch_functions_type=None"
    row = f'    "O6": Level(brief="O6", {weights}, keep_batchnorm_fp32=True, master_weights=True, loss_scale=128.0),\n'
    start = code.index("LEVELS: dict")
    end = code.index("\n}\n", start) + 1
    levels = read_levels(code[:end] + row + code[end:])
    monkeypatch.setattr(initializations, "LEVELS", levels)


def traps(code):
    """How sure each finding is, and the levels that it names."""
    found = [finding for finding in scan_source(code) if finding.kind == "trap"]
    return [(finding.level, *re.findall(r"\bO\d\b", finding.note.partition(":")[0])) for finding in found]


def clip(level, before=""):
    return traps(f"{HEAD}{before}model, opt = amp.initialize(model, opt, opt_level={level})\n{LOOP}")


def test_a_new_row_is_known_at_once(new_row):
    assert clip('"O6"') == [("error", "O6")]
    assert clip("level") == [("warning", "O2", "O5", "O6")]


def option(arguments):
    return f"{PARSER}parser.add_argument({arguments})\nargs = parser.parse_args()\n"


@pytest.mark.parametrize(
    ("level", "before", "found"),
    [
        ('"O2"', "", [("error", "O2")]),
        ('"O1"', "", []),
        ("level", "", [("warning", "O2", "O5")]),
        ("level", 'level = "O5"\n', [("error", "O5")]),
        ("level", 'level = "O5"\nlevel = other\n', [("warning", "O2", "O5")]),
        ('"O2" if fp16 else "O0"', "", [("warning", "O2")]),
        ("args.opt_level", option('"--opt-level", default="O2"'), [("error", "O2")]),
        ("args.opt_level", option('"--opt-level", default="O1"'), [("warning", "O2", "O5")]),
        (
            "args.opt_level",
            option('"--opt_level", default="O1", choices=["O1", "O2"]'),
            [("warning", "O2")],
        ),
        ("args.opt_level", option('"--opt_level", default="O0", choices=("O0", "O1")'), []),
        ("args.level", option('"-l", "--opt-level", dest="level", default="O2"'), [("error", "O2")]),
        ("args.opt_level", option('"--opt-level", default=DEFAULT'), [("warning", "O2", "O5")]),
        (
            "args.opt_level",
            "DEFAULT = 'O2'\n" + option('"--opt-level", default=DEFAULT'),
            [("error", "O2")],
        ),
        (
            "args.opt_level",
            option('"--opt-level", default="O2"') + 'args.opt_level = "O1"\n',
            [("warning", "O2", "O5")],
        ),
        (
            "args.opt_level",
            "config.level = 'O2'\n" + option('"--opt-level", default=config.level'),
            [("error", "O2")],
        ),
        ("args.opt_level", option('"--opt-level"'), [("warning", "O2", "O5")]),
        ('"O2", master_weights=False', "", []),
        ('"O3", master_weights=True', "", [("error", "O3")]),
        ('"O2", enabled=False', "", []),
    ],
)  # fmt: skip
def test_the_level_of_a_finding(level, before, found):
    assert clip(level, before) == found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("**options", [("warning", "O2", "O5")]),
        ("*options", [("warning", "O2", "O5")]),
        ('opt_level="O2", **options', [("error", "O2")]),
    ],
)
def test_what_is_unpacked_may_be_anything(arguments, found):
    code = f"{HEAD}model, opt = amp.initialize(model, opt, {arguments})\n{LOOP}"
    assert traps(code) == found


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        ("None", [("error", "O1")]),
        ("args.scale", [("error", "O1")]),
        ("1.0", []),
        ('"1.0"', []),
        ("128.0", [("error", "O1")]),
    ],
)
def test_a_scale_that_is_not_known(scale, found):
    loop = "with amp.scale_loss(loss, opt) as scaled:\n    loss.backward()\n"
    code = f'{HEAD}model, opt = amp.initialize(model, opt, opt_level="O1", loss_scale={scale})\n{loop}'
    assert traps(code) == found
