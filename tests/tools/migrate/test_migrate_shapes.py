"""Shapes of scripts, and folders over which the training is spread: migrated, they train like the original."""

import pytest
from running import assert_trains_alike, migrate, write
from shapes import HARD, HEAD, LEFT, SHAPES, TREES

pytestmark = [
    # What the original says of shapes that were made to be hard.
    pytest.mark.filterwarnings("ignore:.*step.. with gradients, but no scale_loss block:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*torch.cpu.amp.autocast.*is deprecated:FutureWarning"
    ),  # checkpoint's, torch 2.4
]


@pytest.mark.parametrize("name", SHAPES)
def test_scripts(name, tmp_path):
    write(tmp_path, {"train.py": HEAD + SHAPES[name]})
    left, under_autocast = assert_trains_alike(tmp_path)
    assert left == {}
    assert (under_autocast > 0) == (name != "a level that does not cast")


@pytest.mark.parametrize("name", TREES)
def test_folders(name, tmp_path):
    script, files = TREES[name]
    write(tmp_path, files)
    left, under_autocast = assert_trains_alike(tmp_path, script)
    assert left == {}
    assert under_autocast > 0
    assert migrate(tmp_path) == {}


@pytest.mark.parametrize("name", LEFT)
def test_what_torch_has_nothing_for_is_marked(name, tmp_path):
    write(tmp_path, {"train.py": HEAD + HARD[name]})
    assert migrate(tmp_path)
