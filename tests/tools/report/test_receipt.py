"""What a receipt says, against what is known to have run."""

import base64
import html.parser
import json
import os
import re
import sys
import time

import pytest
import torch
from torch import nn

from ampcompat import amp
from ampcompat._state import state
from ampcompat.amp.observers import observers
from ampcompat.tools import devices
from ampcompat.tools.data import as_data, from_data
from ampcompat.tools.report import Receipt, schema
from ampcompat.tools.report.history import MOST_POINTS, History
from ampcompat.tools.report.trace import Product, odd_dimensions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(torch.relu(self.inner(x))))


def train(level, steps=4, bad=(), traced=2, **options):
    torch.manual_seed(0)
    receipt = amp.report(steps=traced)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for step in range(steps):
        x = torch.randn(8, 16)
        if step in bad:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model, receipt


def test_o1(capsys):
    model, receipt = train("O1", bad=[2])
    facts = receipt.facts()
    assert facts["traced_steps"] == 2
    # forward: 2 products of 2 * rows * in * out FLOPs, twice; backward: both gradients, less the input's of the first
    inner, head = 2 * 8 * 16 * 32, 2 * 8 * 32 * 10
    assert facts["flops"]["forward"] == {"float16": 2 * (inner + head)}
    assert facts["flops"]["backward"] == {"float16": 2 * (inner + 2 * head)}
    assert facts["half_flops_share"] == 1.0
    assert facts["modules"] == [
        {"module": "inner", "flops": {"float16": 2 * inner}},
        {"module": "head", "flops": {"float16": 2 * head}},
    ]
    assert "float32" in facts["ops"]["forward"]
    casts = {(c["from"], c["to"]): c for c in facts["casts"]}
    assert casts["float32", "float16"]["bytes"] >= 2 * 4 * (8 * 16 + 16 * 32 + 32 * 10)
    assert {(p["module"], p["dtype"]) for p in facts["parameters"]} == {
        ("inner", "float32"),
        ("norm", "float32"),
        ("head", "float32"),
    }
    assert (facts["steps"], facts["skipped"]) == (4, 1)
    assert [point["scales"] for point in facts["history"]] == [[65536.0], [65536.0], [32768.0], [32768.0]]
    assert [point["skipped"] for point in facts["history"]] == [False, False, True, False]
    assert facts["would_repay"] == []
    assert [(r["module"], r["odd"]) for r in facts["odd_products"]] == [("head", [10])]
    assert facts["sentences"][0] == "Half precision is on: 100.0 % of the FLOPs ran in float16."
    assert "1 of 4 optimizer steps were skipped for overflow; the loss scale ended at 32768." in facts["sentences"]


def test_o2_counts_masters_and_halved_weights():
    model, receipt = train("O2")
    memory = receipt.facts()["memory"]
    parameters = sum(p.numel() for p in model.parameters())
    assert memory["weights"] == 2 * parameters
    assert memory["weights_in_float32"] == memory["masters"] == 4 * parameters
    assert memory["forward_results"] < memory["forward_results_in_float32"]


def one_step(model, x, level):
    """The facts of one step on ``x``, of a model that was made after ``report()``, as under the runner."""
    receipt = amp.report(steps=1)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return receipt.facts()


X, W, B, Y = 4 * 8, 5 * 8, 5, 4 * 5  # elements of a linear layer from 8 to 5 on 4 rows


def test_casts_and_memory_of_one_layer_at_o1():
    facts = one_step(lambda: nn.Linear(8, 5), torch.randn(4, 8), "O1")
    casts = {(c["from"], c["to"]): (c["count"], c["bytes"]) for c in facts["casts"]}
    assert casts == {
        ("float32", "float16"): (4, 4 * (X + W + B + Y)),  # input, weight, bias; the gradient of the result
        ("float16", "float32"): (3, 2 * (Y + W + B)),  # the result, for the loss; the gradients of the parameters
    }
    # The half product and what casts made: input, weight, bias, result. Without casts the product would be float32. The
    # rest are single numbers of 4 bytes: the mean, the scaled loss, the seed of the backward, the loss scale.
    made, wide = facts["memory"]["forward_results"], facts["memory"]["forward_results_in_float32"]
    assert 3 * 4 <= made - (2 * Y + 2 * (X + W + B) + 4 * Y) <= 8 * 4
    assert wide - 4 * Y == made - (2 * Y + 2 * (X + W + B) + 4 * Y)
    assert facts["ops"]["forward"]["float16"] == 1
    assert facts["ops"]["backward"] == {"float16": 2, "float32": 2}  # of weight and bias; of scaling and mean


def test_casts_of_one_layer_at_o2_include_those_of_the_masters():
    facts = one_step(lambda: nn.Linear(8, 5), torch.randn(4, 8), "O2")
    casts = {(c["from"], c["to"]): (c["count"], c["bytes"]) for c in facts["casts"]}
    assert casts["float16", "float32"] == (3, 2 * (Y + W + B))  # the result; the gradients, to those of the masters
    # The weights in the forward and before the step (is half(master) what the model has?), and after the step; the
    # input; the gradient of the result. Those of initialize came before counting began.
    assert casts["float32", "float16"] == (8, 4 * (3 * (W + B) + X + Y))


def test_what_is_written_in_place_takes_no_memory():
    def memory(inplace):
        make = lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(inplace=inplace))  # noqa: E731
        found = one_step(make, torch.randn(4, 8), "O0")["memory"]["forward_results"]
        state.reset()
        return found

    assert memory(inplace=False) - memory(inplace=True) == 4 * Y


def test_attention_counts():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    facts = one_step(Attention, torch.randn(2, 4, 8), "O1")
    linear, attention = 2 * 8 * 8 * 24, 2 * 2 * (2 * 4 * 4 * 8)
    assert facts["flops"]["forward"] == {"float16": linear + attention}
    assert facts["flops"]["backward"]["float16"] >= linear + 2 * attention  # some kernels make the scores again


def test_what_stays_float32_is_listed_by_what_it_would_repay():
    model, receipt = train("O1", keep_fp32="inner")
    facts = receipt.facts()
    (row,) = facts["would_repay"]
    assert (row["module"], row["dtype"]) == ("inner", "float32")
    assert 0 < facts["half_flops_share"] < 1


@pytest.mark.parametrize(
    ("level", "options", "reason"),
    [("O0", {}, "opt_level O0 is float32 throughout"), ("O2", {"enabled": False}, "enabled=False")],
)
def test_nothing_in_half(level, options, reason):
    model, receipt = train(level, **options)
    assert receipt.facts()["sentences"][0].startswith("Nothing ran in half precision: ")
    assert reason in receipt.facts()["sentences"][0]


def test_nothing_in_half_without_initialize():
    receipt = amp.report()
    nn.Linear(8, 8)(torch.ones(1, 8))
    assert receipt.facts()["sentences"][0] == (
        "Nothing ran in half precision: amp.initialize was not called in this process; what it started is in receipts"
        " of `ampcompat run` only."
    )


def test_nothing_in_half_because_another_model_runs():
    receipt = amp.report()
    used, given = nn.Linear(8, 8), nn.Linear(8, 8)
    given = amp.initialize(given, opt_level="O2", verbosity=0)
    used(torch.ones(1, 8))
    assert "what runs is not what amp.initialize was given" in receipt.facts()["sentences"][0]


def test_no_block():
    receipt = amp.report()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.warns(UserWarning, match="but no scale_loss block"):
        optimizer.step()
    assert any(s.startswith("No scale_loss block was entered") for s in receipt.facts()["sentences"])


def test_the_trace_ends_and_the_history_goes_on():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model, receipt = train("O1", steps=1, traced=1)
    assert _get_current_dispatch_mode() is None
    before = receipt.facts()["ops"]
    model(torch.ones(8, 16))
    assert receipt.facts()["ops"] == before
    assert receipt in observers()
    receipt.stop()
    assert receipt not in observers()
    receipt.stop()


def test_a_mode_of_the_user_is_left_alone():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    receipt = amp.report(steps=1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step():
        with amp.scale_loss(model(torch.ones(1, 4)).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    with Mode() as mode:
        step()
        seen = mode.seen
        step()
        assert mode.seen > seen
    step()
    assert receipt.facts()["steps"] == 3
    receipt.stop()


def test_bitwise_the_same_run():
    def weights(watched):
        from ampcompat._state import state

        state.reset()
        torch.manual_seed(0)
        if watched:
            amp.report()
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for _ in range(5):
            with amp.scale_loss(model(torch.randn(8, 16)).pow(2).mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [v.clone() for v in model.state_dict().values()]

    for a, b in zip(weights(False), weights(True), strict=True):
        assert torch.equal(a, b)


def test_the_history_is_bounded_and_keeps_skips():
    class Scaler:
        _scale, _init_scale = None, 2.0

    class Session:
        scalers = [Scaler()]

    class Stash:
        session = Session()

    class Optimizer:
        _amp_stash = Stash()

    history = History()
    for step in range(5 * MOST_POINTS):
        history.step(Optimizer(), step % 1000 == 7)
    assert len(history.points) <= MOST_POINTS
    assert sum(bool(p.skipped) for p in history.points) == history.skips == 10
    assert history.points[-1].step == history.steps == 5 * MOST_POINTS


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


def test_facts_of_a_process_survive_its_file():
    """What a process leaves for the first one is read as what it was."""
    _, receipt = train("O1", bad=[1])
    own = receipt._own()
    assert from_data(schema.Own, json.loads(json.dumps(as_data(own)))) == own
    assert own.casts
    assert own.parameters
    assert own.history


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


def test_devices_without_fast_half_arithmetic():
    assert "compute capability 6.1: no tensor cores for float16 (7.0 or more" in devices.slow_capability(
        (6, 1), "GTX 1080", torch.float16
    )
    assert devices.slow_capability((7, 0), "V100", torch.float16) == ""
    assert "(8.0 or more" in devices.slow_capability((7, 5), "T4", torch.bfloat16)
    assert devices.slow_capability((9, 0), "H200", torch.bfloat16) == ""


def test_a_cpu_without_half_arithmetic(monkeypatch):
    from ampcompat import _torch

    for half, text in ((frozenset([torch.float16]), "This CPU has no float16 arithmetic"), (frozenset(), "")):
        monkeypatch.setattr(_torch, "halves_without_cpu_convolution", lambda half=half: half)
        assert devices.slow_halves("cpu", torch.float16).startswith(text)
        assert bool(devices.slow_halves("cpu", torch.float16)) == bool(text)


@pytest.mark.parametrize(
    ("product", "odd"),
    [
        (Product("mm", "", "float16", ((8, 16), (16, 24))), []),
        (Product("mm", "", "float16", ((7, 16), (16, 30))), [7, 30]),
        (Product("convolution", "", "float16", ((2, 3, 9, 9), (16, 3, 5, 5))), [3]),
        (Product("bmm", "", "float16", ((5, 8, 16), (5, 16, 8))), []),
    ],
)
def test_odd_dimensions(product, odd):
    assert odd_dimensions(product) == odd


def test_ops_without_a_whole_step_are_totals(tmp_path):
    receipt = amp.report()
    model = amp.initialize(nn.Linear(16, 16), opt_level="O1", verbosity=0)
    for _ in range(5):
        model(torch.ones(8, 16))
    facts = receipt.facts()
    assert (facts["traced_steps"], facts["whole_steps"]) == (0, False)
    text = str(receipt)
    assert "ops in the script, of which no optimizer step was traced" in text
    assert "FLOPs in all" in text
    assert "forward results in all" in text
    assert "a step" not in text
    receipt.write(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "a step" not in page
    assert "FLOPs in all" in page
    receipt.stop()


def test_fewer_steps_than_are_traced_are_totals_too():
    _, receipt = train("O1", steps=2, traced=3)
    assert receipt.facts()["flops"]["forward"] == {"float16": 2 * 2 * 8 * (16 * 32 + 32 * 10)}
    assert "ops in the script, 2 whole steps among them" in str(receipt)
    assert "a step" not in str(receipt)
    receipt.stop()


class Wide(nn.Module):
    """A wide part, and a narrow one."""

    def __init__(self, disabled=False):
        super().__init__()
        self.narrow, self.wide, self.disabled = nn.Linear(8, 8), nn.Linear(8, 256), disabled

    def forward(self, x):
        x = self.narrow(x).float()
        if not self.disabled:
            return self.wide(x)
        with amp.disable_casts():
            return self.wide(x)


def why(model, level, x=torch.ones(8, 8), outside=lambda y: y, **options):
    receipt = amp.report(steps=1)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    with amp.scale_loss(outside(model(x)).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    facts = receipt.facts()
    return facts["sentences"], [(w["reason"], w["modules"]) for w in facts["why_float32"]], str(receipt)


def test_mostly_float32_because_modules_are_kept():
    sentences, reasons, text = why(Wide, "O1", keep_fp32="wide")
    assert sentences[0] == "Mostly float32: 2.0 % of the FLOPs ran in float16."  # forward 1 of 33, backward 1 of 65
    assert sentences[1] == "In float32, of the forward: 97.0 % kept in float32 (wide)."
    assert reasons == [("kept in float32", ["wide"])]
    assert re.search(r"addmm +wide +.* +kept in float32$", text, re.MULTILINE)


def test_mostly_float32_because_of_disable_casts():
    sentences, reasons, _ = why(lambda: Wide(disabled=True), "O1")
    assert sentences[0].startswith("Mostly float32: ")
    assert reasons == [("under disable_casts", ["wide"])]


def test_mostly_float32_because_a_model_was_not_given():
    other = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8))
    _, reasons, _ = why(lambda: nn.Linear(8, 8), "O2", outside=other)
    assert reasons == [("not given to initialize", ["Sequential.0", "Sequential.1"])]


def test_mostly_float32_because_a_function_is_registered():
    from ampcompat._state import state

    amp.register_float_function(torch, "bmm")
    try:
        model = lambda: nn.Linear(8, 8)  # noqa: E731
        _, reasons, _ = why(model, "O1", outside=lambda y: torch.bmm(y.expand(64, 8, 8), y.expand(64, 8, 8)))
    finally:
        state.reset()
    assert reasons == [("bmm is registered as a float function", ["(outside of modules)"])]


def test_mostly_float32_because_of_the_lists(monkeypatch):
    from ampcompat.amp.lists import torch_overrides

    monkeypatch.setattr(torch_overrides, "FP16_FUNCS", [n for n in torch_overrides.FP16_FUNCS if n != "bmm"])
    monkeypatch.setattr(torch_overrides, "FP32_FUNCS", [*torch_overrides.FP32_FUNCS, "bmm"])
    model = lambda: nn.Linear(8, 8)  # noqa: E731
    _, reasons, _ = why(model, "O1", outside=lambda y: torch.bmm(y.expand(64, 8, 8), y.expand(64, 8, 8)))
    assert reasons == [("bmm is on the float list", ["(outside of modules)"])]


@pytest.mark.parametrize("how", ["listed", "registered"])
def test_mostly_float32_because_of_the_widest_input(monkeypatch, how):
    """A function that promotes gets one float32 argument."""
    from ampcompat._state import state
    from ampcompat.amp.lists import torch_overrides

    if how == "listed":
        monkeypatch.setattr(torch_overrides, "FP16_FUNCS", [n for n in torch_overrides.FP16_FUNCS if n != "bmm"])
        monkeypatch.setattr(torch_overrides, "CASTS", [*torch_overrides.CASTS, "bmm"])
    else:
        amp.register_promote_function(torch, "bmm")
    wide = torch.ones(64, 8, 8)
    try:
        model = lambda: nn.Linear(8, 8)  # noqa: E731
        _, reasons, _ = why(model, "O1", outside=lambda y: torch.bmm(y.half().expand(64, 8, 8), wide))
    finally:
        state.reset()
    assert reasons == [("bmm takes its widest input's dtype", ["(outside of modules)"])]


def test_mostly_float32_because_of_the_scripts_own_region():
    def outside(y):
        with torch.autocast("cpu", enabled=False):
            return y.float().expand(64, 8, 8) @ torch.ones(64, 8, 8)

    sentences, reasons, _ = why(lambda: nn.Linear(8, 8), "O1", outside=outside)
    assert sentences[0].startswith("Mostly float32: ")
    assert reasons == [("in a region of torch.autocast", ["(outside of modules)"])]


class Preconditioned(torch.optim.SGD):
    """Multiplies matrices in its step, as Shampoo and Muon do."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None and p.dim() == 2):
                for _ in range(64):
                    p.grad.copy_(p.grad @ p.grad.t() @ p.grad)
        super().step()
        return loss


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("closure", [False, True])
def test_mostly_float32_because_of_an_optimizer_step(level, closure):
    receipt = amp.report(steps=1)
    model = nn.Linear(8, 8)
    model, optimizer = amp.initialize(model, Preconditioned(model.parameters(), lr=1e-3), opt_level=level, verbosity=0)

    def loss():
        with amp.scale_loss(model(torch.ones(8, 8)).float().mean(), optimizer) as scaled:
            scaled.backward()
        return scaled

    if closure:
        optimizer.step(loss)
    else:
        loss()
        optimizer.step()
    facts = receipt.facts()
    assert facts["sentences"][0].startswith("Mostly float32: ")
    assert [(w["reason"], w["modules"]) for w in facts["why_float32"]] == [
        ("in an optimizer step", ["(outside of modules)"])
    ]


def test_recurrent_cells_have_a_receipt():
    """Their kernel is one of its own, and a product inside of it may be float64."""
    cell = nn.LSTMCell(8, 8).double()
    _, reasons, _ = why(lambda: nn.Linear(8, 8), "O1", outside=lambda y: cell(y.double())[0])
    assert reasons == [("its inputs are float64", ["LSTMCell"])]


def test_mostly_float32_because_of_float64():
    other = nn.Linear(8, 256).double()
    _, reasons, _ = why(lambda: nn.Linear(8, 8), "O1", outside=lambda y: other(y.double()))
    assert reasons == [("its inputs are float64", ["Linear"])]


def with_out(y):
    torch.mm(y.detach().float(), torch.ones(8, 64), out=torch.empty(8, 64))
    return y


def switched_off(y):
    torch.set_autocast_enabled("cpu", False)
    torch.mm(y.detach().float(), torch.ones(8, 64))
    torch.set_autocast_enabled("cpu", True)
    return y


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        (with_out, "no cast is made with out="),
        (switched_off, "no cast reached it"),
    ],
)
def test_what_casts_at_o1_do_not_reach(outside, reason):
    _, reasons, text = why(lambda: nn.Linear(8, 8), "O1", outside=outside)
    assert reasons == [(reason, ["(outside of modules)"])]
    assert re.search(rf"mm +\(outside of modules\) +.* +{reason}$", text, re.MULTILINE)


class Widened(nn.Linear):
    def forward(self, x):
        return super().forward(x).float() @ self.weight.float()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_half_model_that_multiplies_float32(level):
    _, reasons, _ = why(lambda: Widened(8, 8), level)
    assert reasons == [("its inputs are float32", ["Widened"])]


def test_a_model_at_o0_beside_one_in_half():
    torch.manual_seed(0)
    receipt = amp.report(steps=1)
    wide, half = nn.Linear(8, 8), nn.Linear(8, 8)
    wide = amp.initialize(wide, opt_level="O0", verbosity=0)
    half, optimizer = amp.initialize(half, torch.optim.SGD(half.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with amp.scale_loss(half(wide(torch.ones(8, 8))).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    reasons = [(w["reason"], w["modules"]) for w in receipt.facts()["why_float32"]]
    assert reasons == [("opt_level O0 is float32 throughout", ["Linear"])]


def test_a_device_that_holds_no_initialized_model(monkeypatch):
    def outside(y):
        monkeypatch.setattr(state.casts, "device_types", ("cuda",))
        return switched_off(y)

    _, reasons, _ = why(lambda: nn.Linear(8, 8), "O1", outside=outside)
    assert reasons == [("no initialized model is on cpu", ["(outside of modules)"])]


def test_a_closure_is_not_the_optimizer_step_that_calls_it():
    receipt = amp.report(steps=1)
    model = nn.Linear(8, 8)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)

    def closure():
        with amp.scale_loss((model(torch.ones(8, 8)) @ torch.ones(8, 8)).mean(), optimizer) as scaled:
            scaled.backward()

    optimizer.step(closure)
    reasons = [(w["reason"], w["modules"]) for w in receipt.facts()["why_float32"]]
    assert reasons == [("not given to initialize", ["(outside of modules)"])]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (None, "amp.initialize was not called"),
        ({"enabled": False}, "amp.initialize was given enabled=False"),
        ({"opt_level": "O0"}, "opt_level O0 is float32 throughout"),
    ],
)
def test_no_product_is_without_a_reason(options, reason):
    receipt = amp.report(steps=1)
    model = nn.Linear(8, 8)
    if options is not None:
        model = amp.initialize(model, verbosity=0, **options)
    model(torch.ones(8, 8))
    assert [product["reason"] for product in receipt.facts()["would_repay"]] == [reason]


def test_what_runs_before_initialize_is_not_counted():
    receipt = amp.report(steps=1)
    model = nn.Linear(8, 8)
    torch.ones(256, 256) @ torch.ones(256, 256)
    model(torch.ones(8, 8))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(8, 8)).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    facts = receipt.facts()
    assert facts["flops"]["forward"] == {"float16": 2 * 8**3}
    assert facts["would_repay"] == []
    assert [m["module"] for m in facts["modules"]] == ["Linear"]
    assert facts["sentences"][0] == "Half precision is on: 100.0 % of the FLOPs ran in float16."


def test_a_second_initialize_forgets_nothing():
    receipt = amp.report(steps=1)
    first = amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    first(torch.ones(8, 8))
    amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    assert receipt.facts()["flops"]["forward"] == {"float16": 2 * 8**3}


def test_a_receipt_begun_after_initialize_counts_at_once():
    model = amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    receipt = amp.report(steps=1)
    model(torch.ones(8, 8))
    amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    assert receipt.facts()["flops"]["forward"] == {"float16": 2 * 8**3}


def test_above_half_of_the_flops_nothing_is_said_of_float32():
    sentences, reasons, _ = why(Wide, "O1", keep_fp32="narrow")
    assert sentences[0] == "Half precision is on: 98.0 % of the FLOPs ran in float16."
    assert reasons == [("kept in float32", ["narrow"])]
    assert not any("of the forward" in sentence for sentence in sentences)


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


def test_a_forked_copy_begins_anew(tmp_path, monkeypatch):
    from ampcompat.tools.report import processes
    from ampcompat.tools.report import receipt as room

    acts = []
    monkeypatch.setattr(processes, "at_exit", acts.append)
    seen = Receipt(1, str(tmp_path))
    seen.start()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step():
        with amp.scale_loss(model(torch.ones(8, 8)).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    step()
    before = seen.facts()
    monkeypatch.setattr(room.os, "getpid", lambda: 4711)
    monkeypatch.setenv("RANK", "1")
    step()
    assert seen.facts()["steps"] == 1
    (written,) = processes.left(str(tmp_path))
    assert (written.process.pid, written.process.rank) == (4711, 1)
    assert (written.process.ended, written.traced_steps) == (False, 1)

    def exit_of_a_worker():
        try:
            raise ValueError("mine")
        except ValueError:
            sys.exit(1)
        finally:
            acts[0]()

    with pytest.raises(SystemExit):
        exit_of_a_worker()
    (written,) = processes.left(str(tmp_path))
    assert written.process.ended
    assert written.process.error == "ValueError: mine"
    assert written.flops["forward"] == {"float16": before["flops"]["forward"]["float16"]}


def left_behind(tmp_path, pid, **changes):
    """The facts of another process of two steps."""
    from ampcompat.tools.report import processes

    _, receipt = train("O1", steps=2, traced=2)
    facts = receipt._own()
    receipt.stop()
    process = {"pid": pid, "rank": pid, "world": 2, "ended": True, "error": None, **changes.pop("process", {})}
    data = {**as_data(facts), "process": process, **changes}
    (tmp_path / f"{pid}.json").write_text(json.dumps(data))
    state.reset()
    return processes.left(str(tmp_path))


def test_processes_are_added_up(tmp_path):
    one = left_behind(tmp_path, 0)[0]
    left_behind(tmp_path, 1)
    receipt = Receipt(2, str(tmp_path))
    facts = receipt.facts()
    assert facts["steps"] == 4
    assert facts["traced_steps"] == 4
    assert facts["flops"]["forward"] == {"float16": 2 * one.flops["forward"]["float16"]}
    assert facts["modules"][0]["flops"] == {"float16": 2 * one.modules[0].flops["float16"]}
    assert {c["count"] for c in facts["casts"]} == {2 * c.count for c in one.casts}
    assert facts["setting"]["opt_level"] == "O1"
    assert facts["sentences"][0] == "Half precision is on: 100.0 % of the FLOPs ran in float16."
    assert facts["sentences"][-1] == "2 processes trained (ranks 0, 1); their counts are added up."
    assert "ops in 4 traced steps of 2 processes" in str(receipt)
    assert re.search(r"^  1 +1 +100.0 % +2 +2 +0$", str(receipt), re.MULTILINE)


def test_processes_that_are_missing_are_named(tmp_path):
    left_behind(tmp_path, 0)
    left_behind(tmp_path, 1, traced_steps=0, process={"ended": False})
    left_behind(tmp_path, 2, process={"ended": False})
    left_behind(tmp_path, 3, process={"error": "ValueError: no"})
    said = Receipt(2, str(tmp_path)).facts()["sentences"]
    assert said[-4:] == [
        "4 processes trained (ranks 0, 1, 2, 3); their counts are added up.",
        "Process 1 (rank 1) is missing: it called amp.initialize, and was killed, or still runs, before it counted.",
        "Process 2 (rank 2) was killed, or still runs: its first 2 steps are counted, no more.",
        "Process 3 (rank 3) crashed: ValueError: no",
    ]


def test_ranks_of_a_launcher_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    _, receipt = train("O1")
    assert receipt.facts()["sentences"][-1] == (
        "3 of 4 ranks are not in this receipt: it counts one process, of rank 0. `ampcompat run --receipt` adds up the"
        " ranks of a machine."
    )


def launched(monkeypatch, tmp_path, **changes):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torchrun = {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, **changes}.items():
        monkeypatch.setenv(name, value)


def test_ranks_of_one_launch_share_a_private_folder(monkeypatch, tmp_path):
    from ampcompat.tools.report import processes

    launched(monkeypatch, tmp_path)
    folder = processes.folder_of_ranks()
    assert folder == processes.folder_of_ranks()
    assert os.stat(folder).st_mode & 0o77 == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert processes.folder_of_ranks() != folder


@pytest.mark.parametrize(
    ("name", "value"), [("GROUP_RANK", "1"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_PORT", "../x"), ("GROUP_RANK", "")]
)
def test_others_share_none(monkeypatch, tmp_path, name, value):
    from ampcompat.tools.report import processes

    launched(monkeypatch, tmp_path, **{name: value})
    assert processes.folder_of_ranks() is None
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_is_not_used_as_folder(monkeypatch, tmp_path):
    """Another user could have put it in the folder's place."""
    from ampcompat.tools.report import processes

    launched(monkeypatch, tmp_path)
    folder = processes.folder_of_ranks()
    os.rename(folder, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder)
    assert processes.folder_of_ranks() is None


def test_rank_0_waits_for_the_others_and_not_for_ever(monkeypatch, tmp_path):
    from ampcompat.tools.report import processes

    launched(monkeypatch, tmp_path, LOCAL_WORLD_SIZE="3")
    left_behind(tmp_path, 1)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        left_behind(tmp_path, 2, process={"ended": len(waits) == 3})

    monkeypatch.setattr(processes.time, "sleep", sleep)
    processes.wait_for_ranks(str(tmp_path))
    assert len(waits) == 3
    (tmp_path / "2.json").unlink()
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(processes, "PATIENCE", 0.01)
    processes.wait_for_ranks(str(tmp_path))


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


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_a_wrong_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match="positive integer"):
        amp.report(steps=steps)
    assert not observers()


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's, of hooks; it says they run twice
def test_compiled_models_run_eagerly_while_traced():
    torch._dynamo.reset()
    receipt = amp.report(steps=1)
    model = amp.initialize(nn.Sequential(nn.Linear(8, 8)), opt_level="O1", verbosity=0)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(8, 8))
    assert isinstance(receipt, Receipt)
    assert receipt.facts()["half_flops_share"] == 1.0
