"""The digits script, short: it learns at every level, and an interrupted run is an uninterrupted one to the bit."""

import os
import runpy
import sys

import pytest
import torch

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3"]
WEIGHTS = {"O0": "float32", "O1": "float32", "O2": "float16", "O3": "float16", "O4": "float32", "O5": "bfloat16"}


def leaves(value, path=""):
    """Every value in nested containers, by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{path}/{i}").items()}
    return {path: value}


def assert_same_bits(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for path in a:
        if isinstance(a[path], torch.Tensor):
            assert a[path].dtype == b[path].dtype, path
            assert torch.equal(a[path], b[path]), path
        else:
            assert a[path] == b[path], path


def o2_and_slow(levels):
    """Each trains for seconds: the main job runs all levels, and so do the slow tests."""
    return [level if level == "O2" else pytest.param(level, marks=pytest.mark.slow) for level in levels]


@pytest.mark.parametrize("level", o2_and_slow([*LEVELS, "O4", "O5"]))
def test_it_learns(run_example, level):
    result = run_example("digits.py", "--opt-level", level, "--epochs", 3)
    # run_levels.py asks 97 % of the whole run of 20 epochs; this one is short.
    assert result["accuracy"] >= 95
    assert result["weights"] == WEIGHTS[level]
    assert result["steps"] == 54


@pytest.mark.parametrize("script", ["digits.py", "gan.py"])
def test_the_level_reported_is_the_one_in_force(run_example, monkeypatch, script):
    short = ["--stop-after", 1] if script == "digits.py" else ["--steps", 1]
    assert run_example(script, "--opt-level", "O1", *short)["opt_level"] == "O1"
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", "O2")
    assert run_example(script, "--opt-level", "O1", *short)["opt_level"] == "O2"


@pytest.mark.parametrize("level", o2_and_slow(LEVELS))
def test_interrupted_is_uninterrupted(run_example, tmp_path, level):
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    args = ["digits.py", "--opt-level", level, "--epochs", 2]
    uninterrupted = run_example(*args, "--checkpoint", whole)
    # In the middle of an epoch.
    run_example(*args, "--checkpoint", cut, "--stop-after", 25)
    assert torch.load(cut, weights_only=True)["step"] == 25
    resumed = run_example(*args, "--checkpoint", cut, "--resume", cut)
    assert_same_bits(torch.load(whole, weights_only=True), torch.load(cut, weights_only=True))
    assert resumed["accuracy"] == uninterrupted["accuracy"]


def test_skipped_steps_are_counted_as_amp_prints_them(run_example, capsys, monkeypatch):
    initialize = amp.initialize

    def from_a_scale_that_overflows(*args, **kwargs):
        models = initialize(*args, **kwargs)
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**24
        return models

    monkeypatch.setattr(amp, "initialize", from_a_scale_that_overflows)
    result = run_example("digits.py", "--opt-level", "O2", "--epochs", 1)
    assert result["skipped_steps"] == capsys.readouterr().out.count("Gradient overflow") > 0
    assert result["loss_scale"] == 2.0 ** (24 - result["skipped_steps"])


@pytest.mark.parametrize(
    ("arg", "scale"), [("128.0", 128.0), ("dynamic", 65536.0)], ids=["a number in a string", "the word dynamic"]
)
def test_properties_as_strings(run_example, arg, scale):
    result = run_example(
        "digits.py", "--opt-level", "O2", "--loss-scale", arg, "--keep-batchnorm-fp32", "False", "--stop-after", 3
    )
    assert result["loss_scale"] == scale


def test_a_failed_save_leaves_the_last_checkpoint_whole(run_example, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    run_example("digits.py", "--opt-level", "O2", "--checkpoint", path, "--stop-after", 2)
    before = path.read_bytes()

    def half_a_file(state, file):
        file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half_a_file)
    with pytest.raises(KeyboardInterrupt):
        run_example("digits.py", "--opt-level", "O2", "--checkpoint", path, "--stop-after", 2)
    assert path.read_bytes() == before
    assert {p.suffix for p in tmp_path.iterdir()} <= {".pt", ".partial", ".json"}


def test_the_checkpoint_holds_the_amp_key(run_example, tmp_path):
    path = tmp_path / "last.pt"
    run_example("digits.py", "--opt-level", "O1", "--checkpoint", path, "--stop-after", 2)
    # Two steps of two backward passes each; passes with delay_unscale=True do not count.
    assert torch.load(path, weights_only=True)["amp"] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 2}}
    assert os.listdir(tmp_path).count("last.pt") == 1


@pytest.mark.parametrize("script", ["digits.py", "gan.py"])
def test_without_apex_the_script_says_how_to_run_it(examples, monkeypatch, script):
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(SystemExit, match=f"ampcompat run docs/examples/{script}"):
        runpy.run_path(str(examples / script), run_name="__main__")
