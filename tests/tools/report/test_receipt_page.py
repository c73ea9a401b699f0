"""The receipt as a page, as text and as JSON, and its first sentence."""

import base64
import html.parser
import json
import re
import sys
import time

import pytest
import torch
from receipts import train
from torch import nn

from ampcompat import amp
from ampcompat.tools.report import Receipt


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def images(page):
    """The plots of a page, by title: the text of each SVG."""
    found = {}
    for tag, name, value in page.attributes:
        if tag == "img" and name == "alt":
            title = value
        if tag == "img" and name == "src":
            found[title] = base64.b64decode(value.partition("base64,")[2]).decode()
    return found


EVIL = "<script>alert('$x_$')</script>&\"'"


def test_names_of_others_are_shown_as_they_are(tmp_path):
    """Module names, arguments and errors are anybody's: in the page they are text, in the plots too."""
    receipt = Receipt(1, argv=["train.py", EVIL])
    receipt.start()
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(8, 8))
    model = amp.initialize(model, opt_level="O1", verbosity=0)
    model(torch.ones(8, 8))
    receipt.crashed(ValueError(EVIL))
    receipt.stop()
    receipt.write(tmp_path / "r.html")
    source = (tmp_path / "r.html").read_text(encoding="utf-8")
    for text in (source, receipt._repr_html_()):
        page = Page()
        page.feed(text)
        assert page.open == []
        assert page.tags.count("script") == (text is source)
        assert EVIL in page.text
        drawn = images(page)["Forward FLOPs in all, by module"]
        assert "<script" not in drawn
        assert html.unescape(drawn).count(EVIL[-20:]) == 1
    data = re.search(r'<script type="application/json" id="receipt">(.*)</script>', source, re.S).group(1)
    assert json.loads(data) == json.loads(json.dumps({**receipt.facts(), "seconds": json.loads(data)["seconds"]}))


def test_without_matplotlib_the_page_has_no_plots(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ampcompat.tools.report.plots", None)
    _, receipt = train("O1")
    receipt.write(tmp_path / "r.html")
    source = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<img" not in source
    assert "matplotlib is missing - pip install &#39;ampcompat[report]&#39;" in source
    assert "<td>forward</td><td>float16</td>" in source


def test_without_jinja2_there_is_no_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ampcompat.tools.report.html", None)
    monkeypatch.delattr("ampcompat.tools.report.html", raising=False)
    _, receipt = train("O1")
    with pytest.raises(ImportError, match=r"r.html - a page needs jinja2 - pip install 'ampcompat\[report\]'"):
        receipt.write(tmp_path / "r.html")
    assert receipt._repr_html_() is None
    assert list(tmp_path.iterdir()) == []
    receipt.write(tmp_path / "r.txt")


def test_the_page_needs_nothing_else_and_is_well_formed(tmp_path):
    model, receipt = train("O1", bad=[1])
    receipt.write(tmp_path / "receipt.html")
    source = (tmp_path / "receipt.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    assert page.open == []
    assert not [a for a in page.attributes if a[1] == "href" or (a[2] or "").startswith("http")]
    assert all(value.startswith("data:") for _, name, value in page.attributes if name == "src")
    assert "url(" not in source
    titles = ["FLOPs a step", "Ops a step", "Forward FLOPs a step, by module", "Loss scale"]
    assert list(images(page)) == titles
    assert "skipped step" in images(page)["Loss scale"]
    data = re.search(r'<script type="application/json" id="receipt">(.*)</script>', source, re.S).group(1)
    assert json.loads(data)["steps"] == 4
    assert "Half precision is on: 100.0 % of the FLOPs ran in float16." in "".join(page.text)
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.html"]


def test_json_and_text(tmp_path, monkeypatch):
    model, receipt = train("O2")
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic(): now)  # seconds since its start are in it
    receipt.write(tmp_path / "r.json")
    receipt.write(tmp_path / "r.txt")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(receipt.facts()))
    text = (tmp_path / "r.txt").read_text()
    assert text == str(receipt) + "\n"
    assert text.startswith("precision receipt: opt_level O2, half is float16\n  Half precision is on")
    assert "float16  938" in text


def test_a_run_that_never_stepped_has_a_receipt(tmp_path):
    receipt = amp.report()
    for name in ("r.html", "r.txt", "r.json"):
        receipt.write(tmp_path / name)
    assert "amp.initialize was not called" in (tmp_path / "r.html").read_text()


def test_script_arguments_date_and_versions(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    _, receipt = train("O1")
    monkeypatch.setattr(sys, "argv", ["changed since"])
    facts = receipt.facts()
    assert (facts["script"], facts["arguments"]) == ("train.py", ["--lr", "0.1"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", facts["date"])
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["versions"]) == {"ampcompat", "torch", "python", "cuda"}
    assert re.search(r"script +train.py --lr 0.1$", str(receipt), re.MULTILINE)
    receipt.write(tmp_path / "r.html")
    assert "train.py --lr 0.1" in (tmp_path / "r.html").read_text()


def test_a_notebook_shows_the_page_as_a_part_of_its_own():
    _, receipt = train("O1", bad=[1])
    part = receipt._repr_html_()
    page = Page()
    page.feed(part)
    assert page.open == []
    assert page.tags[:2] == ["style", "div"]
    assert "Half precision is on" in "".join(page.text)
    style = re.sub(r"/\*.*?\*/", "", part[part.index("<style>") + 7 : part.index("</style>")], flags=re.DOTALL)
    style = style.replace("@media (prefers-color-scheme: dark) {", "")
    selectors = [one for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
    assert selectors
    assert all(one.strip().startswith(".receipt") for one in selectors)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (ValueError("no such\nfile"), "The script crashed after 4 optimizer steps: ValueError: no such"),
        (
            ChildProcessError("\n\n-- Process 1 terminated with the following error:\nTraceback ...\nKeyError: 3\n"),
            "The script crashed after 4 optimizer steps: ChildProcessError: -- Process 1 terminated with the following"
            " error: KeyError: 3",
        ),
        (KeyboardInterrupt(), "The script was interrupted after 4 optimizer steps."),
        (SystemExit(3), "The script ended with 3."),
        (SystemExit(0), "Half precision is on: 100.0 % of the FLOPs ran in float16."),
    ],
)
def test_how_the_script_ended_comes_first(error, first):
    _, receipt = train("O1")
    receipt.crashed(error)
    assert receipt.facts()["sentences"][0] == first
