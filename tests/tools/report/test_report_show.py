"""The precision report as a page, as text and as JSON, and its first sentence."""

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from amp_training import reset
from python_process import PATH_WITH_TESTS
from report_runs import train
from torch import nn

from ampcompat import amp
from ampcompat.tools.report import PrecisionReport, report_as_asked
from ampcompat.tools.report.show import scale_labels


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


EVIL = "<script>alert('$x_$')</script>&\"'"


def test_names_of_others_are_shown_as_they_are(tmp_path):
    """Arguments and errors are anybody's: in the page they are text."""
    report = PrecisionReport(1, argv=["train.py", EVIL])
    report.start()
    model = amp.initialize(nn.Linear(8, 8), opt_level="O1", verbosity=0)
    model(torch.ones(8, 8))
    report.ended_by(ValueError(EVIL))
    report.stop()
    report.write(tmp_path / "r.html")
    source = (tmp_path / "r.html").read_text(encoding="utf-8")
    for text in (source, report._repr_html_()):
        page = Page()
        page.feed(text)
        assert page.open == []
        assert page.tags.count("script") == (text is source)
        assert sum(EVIL in one for one in page.text) == 2
    data = re.search(r'<script type="application/json" id="report">(.*)</script>', source, re.S).group(1)
    assert json.loads(data) == json.loads(json.dumps(report.facts()))


def test_the_page_needs_nothing_else_and_is_well_formed(tmp_path):
    model, report = train("O1", bad=[1])
    report.write(tmp_path / "report.html")
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    assert page.open == []
    assert not [a for a in page.attributes if a[1] in ("href", "src") or (a[2] or "").startswith("http")]
    assert "url(" not in source
    (curve,) = [value for tag, name, value in page.attributes if (tag, name) == ("polyline", "points")]
    heights = [float(point.partition(",")[2]) for point in curve.split()]
    assert heights == [0.0, 160.0, 160.0, 160.0]  # 65536, then 32768
    assert page.tags.count("circle") == 1
    labels = page.text[page.text.index("loss scale") :]
    assert [label for label in labels if label.strip()][:7] == [
        "loss scale", "65536", "32768", "1", "2", "4", "optimizer step; dots: skipped",
    ]  # fmt: skip
    data = re.search(r'<script type="application/json" id="report">(.*)</script>', source, re.S).group(1)
    assert json.loads(data)["steps"] == 4
    assert "Half precision is on: 100.0 % of the FLOPs ran in float16." in "".join(page.text)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_constant_scale_needs_no_picture():
    _, report = train("O1")
    assert "<svg" not in report._repr_html_()
    assert "the loss scale was 65536 throughout" in report._repr_html_()


def test_each_scaler_has_a_curve_with_its_name():
    report = amp.report()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, num_losses=2, verbosity=0)
    for scale in (1.0, float("inf")):
        for loss_id in range(2):
            with amp.scale_loss(model(torch.ones(2, 4)).sum() * scale, optimizer, loss_id) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    page = Page()
    page.feed(report._repr_html_())
    assert page.tags.count("polyline") == 2
    assert [text for text in page.text if text.startswith("loss ")] == ["loss scale", "loss 0", "loss 1"]


@pytest.mark.parametrize(
    ("highest", "lowest", "expected"),
    [
        (2**16, 2**15, [2**16, 2**15]),
        (2**24, 1, [2**24, 2**20, 2**16, 2**12, 2**8, 2**4, 1]),
        (2**17, 2**7, [2**17, 2**15, 2**13, 2**11, 2**9, 2**7]),
        (1000, 100, [512, 256, 128]),
        (100, 70, [100, 70]),
    ],
)
def test_scales_that_are_labelled(highest, lowest, expected):
    assert scale_labels(lowest, highest) == expected


def test_json_and_text(tmp_path):
    model, report = train("O2")
    report.write(tmp_path / "r.json")
    report.write(tmp_path / "r.txt")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(report.facts()))
    text = (tmp_path / "r.txt").read_text()
    assert text == str(report) + "\n"
    assert text.startswith("precision report: opt_level O2, half is float16\n  Half precision is on")
    assert re.search(r"^  addmm +forward +float16 +4 +", text, re.MULTILINE)
    assert re.search(r"^  cast from float32 +forward +float16 +2 *$", text, re.MULTILINE)


def test_a_run_that_never_stepped_has_a_report(tmp_path):
    report = amp.report()
    for name in ("r.html", "r.txt", "r.json"):
        report.write(tmp_path / name)
    assert "amp.initialize was not called" in (tmp_path / "r.html").read_text()


def test_script_arguments_and_versions(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    _, report = train("O1")
    monkeypatch.setattr(sys, "argv", ["changed since"])
    facts = report.facts()
    assert (facts["script"], facts["arguments"]) == ("train.py", ["--lr", "0.1"])
    assert facts["versions"]["torch"] == torch.__version__
    report.write(tmp_path / "r.html")
    assert "train.py --lr 0.1" in (tmp_path / "r.html").read_text()


def test_a_notebook_shows_the_page_as_a_part_of_its_own():
    _, report = train("O1", bad=[1])
    part = report._repr_html_()
    page = Page()
    page.feed(part)
    assert page.open == []
    assert page.tags[:2] == ["style", "div"]
    assert "Half precision is on" in "".join(page.text)
    style = re.sub(r"/\*.*?\*/", "", part[part.index("<style>") + 7 : part.index("</style>")], flags=re.DOTALL)
    style = style.replace("@media (prefers-color-scheme: dark) {", "")
    selectors = [one for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
    assert selectors
    assert all(one.strip().startswith(".precision-report") for one in selectors)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such\nfile"), "ValueError: no such"),
        (
            ChildProcessError("\n\n-- Process 1 terminated with the following error:\nTraceback ...\nKeyError: 3\n"),
            "ChildProcessError: -- Process 1 terminated with the following error: KeyError: 3",
        ),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "it exited with 3"),
    ],
)
def test_what_ended_the_script_comes_first(error, said):
    _, report = train("O1")
    report.ended_by(error)
    facts = report.facts()
    assert facts["error"] == said
    assert facts["sentences"][0] == f"The script ended after 4 optimizer steps: {said}"


def test_a_good_end_is_not_mentioned():
    _, report = train("O1")
    report.ended_by(SystemExit(0))
    assert report.facts()["sentences"][0].startswith("Half precision is on")


# -- ranks -------------------------------------------------------------------------------------------------------------
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
        assert facts["sentences"][-1] == f"This report is of rank {rank}, one of 2."


def test_rank_0_alone_prints(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    _, report = train("O1")
    assert report.save("") == ""


# -- a file that cannot be written -------------------------------------------------------------------------------------
def test_a_report_whose_file_cannot_be_written_is_printed(monkeypatch, tmp_path):
    _, report = train("O1", steps=1)

    def full(self, *_args, **_options):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    told = report.save(str(tmp_path / "r.html"))
    assert told.startswith("precision report: opt_level O1")
    assert told.endswith(f"could not be written to {tmp_path / 'r.html'}: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    """/dev/stderr is one, or the other."""
    _, report = train("O1", steps=1)
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
    ("name", "reason"), [("no/such/r.html", "its folder does not exist"), ("folder", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    _, report = train("O1", steps=1)
    path = tmp_path / name
    with pytest.raises(OSError, match=re.escape(f"report.write({str(path)!r}) - {reason} - name a file that can be")):
        report.write(path)
    assert report.save(str(path)).endswith(f"could not be written to {path}: {reason}")


def test_the_environment_names_a_file_that_can_be_written(monkeypatch):
    monkeypatch.setenv("AMPCOMPAT_REPORT", "/nonexistent/x.html")
    with pytest.raises(ValueError, match=r"^AMPCOMPAT_REPORT='/nonexistent/x.html' - its folder does not exist - name"):
        report_as_asked()


def test_many_skipped_steps_point_to_explain():
    _, usual = train("O1", steps=6, bad=(1,))
    reset()
    _, report = train("O1", steps=14, bad=range(12))
    hint = "Finding the loss scale costs fewer: `ampcompat run --explain` looks for the cause."
    assert hint in report.facts()["sentences"]
    assert hint not in usual.facts()["sentences"]
