"""Shapes of legacy scripts: what is said to be right trains like the original, the rest is marked."""

import ast
import functools
import sys

import pytest
import torch
from legacy_shapes import HEAD, MARKED, RIGHT

import ampcompat
from ampcompat import amp
from ampcompat._state import state
from ampcompat.tools.migrate import migrate_source


@functools.cache
def migrated(name):
    return migrate_source(HEAD + {**RIGHT, **MARKED}[name], "native")


def run(code, monkeypatch, apex):
    """The losses of a script, and whether each forward of a linear layer ran under autocast."""
    under = []
    real = torch.nn.functional.linear
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n == "apex" or n.startswith("apex.")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "apex", ampcompat if apex else None)
        if apex:
            patch.setitem(sys.modules, "apex.amp", amp)
        else:

            def linear(*args, **kwargs):
                under.append(torch.is_autocast_enabled("cpu"))
                return real(*args, **kwargs)

            patch.setattr(torch.nn.functional, "linear", linear)
        variables = {"__name__": "shape"}
        try:
            exec(compile(code, "shape.py", "exec"), variables)
        finally:
            state.reset()
    return variables["LOSSES"], under


def assert_trains_alike(name, monkeypatch):
    before = HEAD + {**RIGHT, **MARKED}[name]
    expected, _ = run(before, monkeypatch, apex=True)
    losses, under = run(migrated(name).code, monkeypatch, apex=False)
    # Native autocast keeps a few operations in half that apex's lists run in float32, and other roundings: 2^-7.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2**-7, atol=2**-7)
    return under


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*is deprecated:FutureWarning")  # checkpoint's, torch 2.4
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_trains_like_the_original(name, monkeypatch):
    result = migrated(name)
    assert result.todos == []
    assert "apex" not in result.code
    under = assert_trains_alike(name, monkeypatch)
    # Copies that were made before the model went under amp run in float32, as they did under apex.
    assert (True in under) == (name != "a level that does not cast")


@pytest.mark.parametrize("name", ["lists of models and optimizers", "a switch", "O2", "delayed unscaling"])
def test_renamed_imports_change_no_number(name, monkeypatch):
    before = HEAD + RIGHT[name]
    renamed = migrate_source(before).code
    assert "ampcompat" in renamed
    assert run(renamed, monkeypatch, apex=True) == run(before, monkeypatch, apex=True)


# The original says so of a loss that is scaled some of the time.
@pytest.mark.filterwarnings("ignore:.*step.. with gradients, but no scale_loss block:UserWarning")
@pytest.mark.parametrize("name", MARKED)
def test_what_is_hard_is_marked_or_trains_alike(name, monkeypatch):
    result = migrated(name)
    ast.parse(result.code)
    runs = "LOSSES.append" in MARKED[name] and "from engine import" not in MARKED[name]
    if runs and not result.todos:
        assert_trains_alike(name, monkeypatch)


@pytest.mark.parametrize("name", [*RIGHT, *MARKED])
def test_a_second_run_changes_nothing(name):
    once = migrated(name)
    assert migrate_source(once.code, "native").code == once.code


def test_there_are_enough_shapes():
    assert len(RIGHT) + len(MARKED) >= 63
