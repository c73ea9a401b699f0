"""What the check says, word for word; other tests ask for names and levels."""

import pytest
from rule_examples import CLIP, TRUE, option, trained

from ampcompat.cli import main
from ampcompat.tools.check import scan_source

NOTES = {
    "clip_of_model_params": "at O2: the optimizer steps master parameters, so that this changes nothing; clip"
    " amp.master_params(optimizer)",
    "edit_of_model_gradients": "at O2: the optimizer steps master parameters, so that this changes nothing; edit"
    " amp.master_params(optimizer)",
    "clip_of_scaled_gradients": "at O1: gradients are scaled until the scale_loss block ends; clip after the block",
    "step_in_block": "at O2: gradients are unscaled at the end of the scale_loss block, and this is refused; step after"
    " it",
    "backward_after_block": "at O1: the block that unscales its gradients has ended; indent scaled.backward() into it",
    "unscaled_backward": "at O1: the block unscales gradients that were never scaled; call scaled.backward()",
    "wrapped_before_initialize": "the model is already wrapped in DataParallel, and is refused; wrap what initialize"
    " returns",
    "overflowing_fill": "at O1: -1000000000.0 does not fit float16 (largest: 65504) and raises there; use"
    " torch.finfo(x.dtype).min, or -1e4",
}


def notes(code):
    return [finding.note for finding in scan_source(code) if finding.kind == "trap"]


@pytest.mark.parametrize("rule", TRUE)
def test_the_note_of_a_rule(rule):
    code, _ = next(iter(TRUE[rule].values()))
    assert notes(code) == [NOTES[rule]]


def test_other_notes_of_these_rules():
    assert notes(TRUE["unscaled_backward"]["without a block at O2"][0]) == [
        "at O2: without a scale_loss block the loss is not scaled, and with masters nothing is trained; write"
        " `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
    ]
    (note,) = notes(TRUE["wrapped_before_initialize"]["in some runs"][0])
    assert note.startswith("in some runs the model is already wrapped")


@pytest.mark.parametrize(
    ("default", "where"),
    [("O2", "at O2, the default: "), ("O1", "if the level is O2 or O5: "), ("O0", "if the level is")],
)
def test_what_is_said_of_the_level(default, where):
    (note,) = notes(trained("args.opt_level", CLIP, before=option(default)))
    assert note.startswith(where)


def test_findings_one_a_line(tmp_path, capsys, monkeypatch):
    """Each as ``path:line:col: name verdict: message``, by the path from where it runs; what works is counted."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "x.py").write_text(
        "import torch\nfrom apex import amp, RNN\nmodel = torch.nn.DataParallel(model)\n"
        "model, o = amp.initialize(model, o)\n"
    )
    (tmp_path / "repo" / "y.py").write_text("x = (\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "repo"]) == 1
    lines = [
        "repo/x.py:2:1: apex.RNN not supported: use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
        f"repo/x.py:4:12: wrapped_before_initialize error: {NOTES['wrapped_before_initialize']}",
        "repo/y.py:1:1: unparsable error: Python 3 cannot parse the file ('(' was never closed)",
        "2 files: 1 not supported, 2 error, 2 works",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["check", "repo", "--all"]) == 1
    working = ["repo/x.py:2:1: apex.amp works", "repo/x.py:4:12: apex.amp.initialize works"]
    assert capsys.readouterr().out.splitlines() == [lines[0], *working, *lines[1:]]


def test_nothing_found_says_so(tmp_path, capsys):
    (tmp_path / "x.py").write_text("import torch\n")
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 file: no findings\n"
