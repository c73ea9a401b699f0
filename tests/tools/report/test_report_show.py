"""The precision report in words, as a file, and what is told of files."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from internals import reset
from python_process import PATH_WITH_TESTS
from report_runs import train

from ampcompat import amp
from ampcompat.tools.report import report_as_asked
from ampcompat.tools.report.facts import Facts, Float32Product, OpCount, sentences
from ampcompat.tools.report.show import ROWS, as_text

HALF = OpCount("mm", "forward", "float16", 4, 3_000)
FLOAT = OpCount("mm", "forward", "float32", 4, 1_000)
WITH_AMP = Facts(initialized=True, enabled=True, opt_level="O1", half="float16", ops=[HALF], half_flops_share=1.0)


def said(**changes):
    return sentences(dataclasses.replace(WITH_AMP, **changes))


# -- the first sentence ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "100.0 % of the FLOPs ran in float16."),
        ({"half_flops_share": 0.123}, "12.3 % of the FLOPs ran in float16."),
        (
            {"half_flops_share": None},
            "Ops ran in float16, but no matrix product, convolution or attention among them.",
        ),
        ({"ops": [FLOAT]}, "Nothing ran in half precision: see that amp.initialize was given the model"),
        ({"ops": []}, "Nothing ran in half precision: no op was traced."),
        ({"ops": [FLOAT], "half": "", "opt_level": "O0"}, "Nothing ran in half precision: opt_level O0 is float32 "),
        ({"ops": [FLOAT], "enabled": False}, "Nothing ran in half precision: amp.initialize was called with"),
        ({"ops": [], "initialized": False}, "Nothing ran in half precision: amp.initialize was not called in this "),
        ({"error": "KeyError: 3", "steps": 4}, "The script ended after 4 optimizer steps: KeyError: 3"),
    ],
)
def test_the_first_sentence(changes, first):
    assert said(**changes)[0].startswith(first)


def test_a_half_model_without_amp():
    """As fp16_utils.FP16_Optimizer steps it: half is used, and amp has no part in it."""
    facts = Facts(ops=[HALF], half_flops_share=1.0)
    facts.sentences = sentences(facts)
    head, first, *_ = as_text(facts).splitlines()
    assert head == "precision report: amp.initialize was not called, half is not used by amp"
    assert first == "  100.0 % of the FLOPs ran in half."
    facts.half_flops_share = None
    assert sentences(facts)[0].startswith("Ops ran in half, but no matrix product")


# -- the others --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blocks": 4}, "0 of 4 optimizer steps were skipped for overflow."),
        (
            {"blocks": 4, "skipped": 1, "loss_scales": {1: 0.5, 0: 2.0**24}},
            "1 of 4 optimizer steps was skipped for overflow; the loss scale ended at 16777216, 0.5.",
        ),
        ({}, "No scale_loss block was entered: no loss was scaled."),
        ({"rank": 1, "world": 2}, "This report is of rank 1, one of 2."),
        (
            {"float32_products": [Float32Product("mm", f"train.py:{n}", 1, 9) for n in range(7)]},
            "Products in float32: mm at train.py:0; mm at train.py:1; mm at train.py:2; mm at train.py:3;"
            " mm at train.py:4; and at 2 more places.",
        ),
    ],
)
def test_a_sentence(changes, sentence):
    assert sentence in said(steps=4, **changes)


def test_without_scaling_a_missing_block_is_no_sentence():
    assert len(said(steps=4, half="bfloat16")) == 2


def test_text():
    text = as_text(dataclasses.replace(WITH_AMP, sentences=["One."], traced_steps=1))
    assert text.splitlines() == [
        "precision report: opt_level O1, half is float16",
        "  One.",
        "",
        "ops in 1 traced step",
        "  op  pass     dtype    count  FLOPs",
        "  --  -------  -------  -----  -----",
        "  mm  forward  float16  4      3 k",
    ]
    assert "ops in the script, of which no optimizer step was traced" in as_text(WITH_AMP)
    long = as_text(dataclasses.replace(WITH_AMP, ops=[HALF] * (ROWS + 2)))
    assert long.endswith("\n  and 2 more: --report=FILE.json has all")


# -- files -------------------------------------------------------------------------------------------------------------
def test_json_and_text(tmp_path):
    _, report = train("O2")
    report.write(tmp_path / "r.json")
    report.write(tmp_path / "r.txt")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(report.facts()))
    assert (tmp_path / "r.txt").read_text() == str(report) + "\n"


def test_a_run_that_never_stepped_has_a_report(tmp_path):
    report = amp.report()
    report.write(tmp_path / "r.txt")
    assert "amp.initialize was not called" in (tmp_path / "r.txt").read_text()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such\nfile"), "ValueError: no such"),
        (
            ChildProcessError("\n\n-- Process 1 terminated with the following error:\nTraceback ...\nKeyError: 3\n"),
            "ChildProcessError: -- Process 1 terminated with the following error: KeyError: 3",
        ),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "it exited with 3"),
        (SystemExit(0), None),
    ],
)
def test_what_ended_the_script(error, told):
    report = amp.report()
    report.ended_by(error)
    assert report.facts()["error"] == told


def test_each_rank_writes_a_file_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        _, report = train("O1")
        told.append(report.save("r.json"))
        reset()
    assert told == ["wrote the precision report to r.rank0.json; each rank writes its own", ""]
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"r.rank{rank}.json").read_text())
        assert (facts["rank"], facts["world"], facts["steps"]) == (rank, 2, 4)


def test_rank_0_alone_prints(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    _, report = train("O1")
    assert report.save("") == ""


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    """/dev/stderr is one, or the other."""
    report = amp.report()
    target, link, pipe = tmp_path / "target.txt", tmp_path / "link.txt", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    report.write(link)
    assert link.is_symlink()
    assert target.read_text().startswith("precision report")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    report.write(pipe)
    assert os.read(reader, 16) == b"precision report"
    os.close(reader)
    assert pipe.is_fifo()


def test_what_the_shell_writes_is_not_written_by_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('a step')")
    command = [sys.executable, "-m", "ampcompat", "run", "--report=/dev/stdout", str(script)]
    environment = {**os.environ, "PYTHONPATH": PATH_WITH_TESTS}
    with (tmp_path / "log.txt").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "--report='/dev/stdout' - it leads to a plain file - name a file that can be written" in done.stderr


@pytest.mark.parametrize(
    ("name", "reason"), [("no/such/r.txt", "its folder does not exist"), ("folder", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, reason):
    """``save``, at the end of a script, prints the report in its place."""
    (tmp_path / "folder").mkdir()
    report = amp.report()
    path = tmp_path / name
    with pytest.raises(OSError, match=re.escape(f"report.write({str(path)!r}) - {reason} - name a file that can be")):
        report.write(path)
    told = report.save(str(path))
    assert told.startswith("precision report: ")
    assert told.endswith(f"could not be written to {path}: {reason}")


def test_the_environment_names_a_file_that_can_be_written(monkeypatch):
    monkeypatch.setenv("AMPCOMPAT_REPORT", "/nonexistent/x.txt")
    with pytest.raises(ValueError, match=r"^AMPCOMPAT_REPORT='/nonexistent/x.txt' - its folder does not exist - name"):
        report_as_asked()
