"""Why products were not half: the reasons that a precision report gives, and its first sentences."""

import re

import pytest
import torch
from amp_training import casts, initialized, make_step, reset
from report_runs import one_step, train
from torch import nn

from ampcompat import amp
from ampcompat.amp.lists import torch_overrides

OUTSIDE = "(outside of modules)"


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


class Widened(nn.Linear):
    def forward(self, x):
        return super().forward(x).float() @ self.weight.float()


def linear():
    return nn.Linear(8, 8)


def why(model, level, outside=lambda y: y, **options):
    """The sentences of one step, its reasons with their modules, and the report as text."""
    report = one_step(model, torch.ones(8, 8), level, outside, **options)
    return report.facts()["sentences"], reasons_of(report), str(report)


def reasons_of(report):
    return [(row["reason"], row["modules"]) for row in report.facts()["why_float32"]]


def bmm(y):
    return torch.bmm(y.expand(64, 8, 8), y.expand(64, 8, 8))


def bmm_with_float32(y):
    return torch.bmm(y.half().expand(64, 8, 8), torch.ones(64, 8, 8))


def in_a_region(y):
    with torch.autocast("cpu", enabled=False):
        return y.float().expand(64, 8, 8) @ torch.ones(64, 8, 8)


def with_out(y):
    torch.mm(y.detach().float(), torch.ones(8, 64), out=torch.empty(8, 64))
    return y


def switched_off(y):
    torch.set_autocast_enabled("cpu", False)
    torch.mm(y.detach().float(), torch.ones(8, 64))
    torch.set_autocast_enabled("cpu", True)
    return y


@pytest.mark.parametrize(
    ("reason", "level", "model", "outside", "modules"),
    [
        ("under disable_casts", "O1", lambda: Wide(disabled=True), lambda y: y, ["wide"]),
        (
            "not given to initialize",
            "O2",
            linear,
            nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8)),
            ["Sequential.0", "Sequential.1"],
        ),
        ("in a region of torch.autocast", "O1", linear, in_a_region, [OUTSIDE]),
        ("its inputs are float64", "O1", linear, lambda y: nn.Linear(8, 256).double()(y.double()), ["Linear"]),
        # Their kernel is one of its own, and a product inside of it may be float64.
        ("its inputs are float64", "O1", linear, lambda y: nn.LSTMCell(8, 8).double()(y.double())[0], ["LSTMCell"]),
        ("its inputs are float32", "O2", lambda: Widened(8, 8), lambda y: y, ["Widened"]),
        ("its inputs are float32", "O3", lambda: Widened(8, 8), lambda y: y, ["Widened"]),
        ("no cast is made with out=", "O1", linear, with_out, [OUTSIDE]),
        ("no cast reached it", "O1", linear, switched_off, [OUTSIDE]),
    ],
)
def test_the_reason_for_float32(reason, level, model, outside, modules):
    _, reasons, text = why(model, level, outside)
    assert reasons == [(reason, modules)]
    assert re.search(rf" {re.escape(reason)}$", text, re.MULTILINE)


def test_mostly_float32_because_modules_are_kept():
    sentences, reasons, text = why(Wide, "O1", keep_fp32="wide")
    assert sentences[0] == "Mostly float32: 2.0 % of the FLOPs ran in float16."  # forward 1 of 33, backward 1 of 65
    assert sentences[1] == "In float32, of the forward: 97.0 % kept in float32 (wide)."
    assert reasons == [("kept in float32", ["wide"])]
    assert re.search(r"addmm +wide +.* +kept in float32$", text, re.MULTILINE)


def test_above_half_of_the_flops_nothing_is_said_of_float32():
    sentences, reasons, _ = why(Wide, "O1", keep_fp32="narrow")
    assert sentences[0] == "Half precision is on: 98.0 % of the FLOPs ran in float16."
    assert reasons == [("kept in float32", ["narrow"])]
    assert not any("of the forward" in sentence for sentence in sentences)


@pytest.mark.parametrize("how", ["listed", "registered"])
@pytest.mark.parametrize(
    ("kind", "outside", "reason"),
    [
        ("float", bmm, {"listed": "bmm is on the float list", "registered": "bmm is registered as a float function"}),
        ("promote", bmm_with_float32, dict.fromkeys(("listed", "registered"), "bmm takes its widest input's dtype")),
    ],
)
def test_a_function_that_is_listed_or_registered(monkeypatch, how, kind, outside, reason):
    if how == "registered":
        getattr(amp, f"register_{kind}_function")(torch, "bmm")
    else:
        name = {"float": "FP32_FUNCS", "promote": "CASTS"}[kind]
        monkeypatch.setattr(torch_overrides, "FP16_FUNCS", [n for n in torch_overrides.FP16_FUNCS if n != "bmm"])
        monkeypatch.setattr(torch_overrides, name, [*getattr(torch_overrides, name), "bmm"])
    try:
        assert why(linear, "O1", outside)[1] == [(reason[how], [OUTSIDE])]
    finally:
        reset()


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
    report = amp.report(steps=1)
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
    facts = report.facts()
    assert facts["sentences"][0].startswith("Mostly float32: ")
    assert [(w["reason"], w["modules"]) for w in facts["why_float32"]] == [
        ("in an optimizer step", ["(outside of modules)"])
    ]


def test_a_closure_is_not_the_optimizer_step_that_calls_it():
    report = amp.report(steps=1)
    model = nn.Linear(8, 8)
    model, optimizer = initialized(model, "O2")

    def closure():
        with amp.scale_loss((model(torch.ones(8, 8)) @ torch.ones(8, 8)).mean(), optimizer) as scaled:
            scaled.backward()

    optimizer.step(closure)
    reasons = [(w["reason"], w["modules"]) for w in report.facts()["why_float32"]]
    assert reasons == [("not given to initialize", ["(outside of modules)"])]


def test_a_model_at_o0_beside_one_in_half():
    torch.manual_seed(0)
    report = amp.report(steps=1)
    wide, half = nn.Linear(8, 8), nn.Linear(8, 8)
    wide = amp.initialize(wide, opt_level="O0", verbosity=0)
    half, optimizer = amp.initialize(half, torch.optim.SGD(half.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    make_step(optimizer, half(wide(torch.ones(8, 8))).mean())
    reasons = [(w["reason"], w["modules"]) for w in report.facts()["why_float32"]]
    assert reasons == [("opt_level O0 is float32 throughout", ["Linear"])]


def test_a_device_that_holds_no_initialized_model(monkeypatch):
    def outside(y):
        monkeypatch.setattr(casts(), "device_types", ("cuda",))
        return switched_off(y)

    _, reasons, _ = why(linear, "O1", outside)
    assert reasons == [("no initialized model is on cpu", ["(outside of modules)"])]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (None, "amp.initialize was not called"),
        ({"enabled": False}, "amp.initialize was given enabled=False"),
        ({"opt_level": "O0"}, "opt_level O0 is float32 throughout"),
    ],
)
def test_no_product_is_without_a_reason(options, reason):
    report = amp.report(steps=1)
    model = nn.Linear(8, 8)
    if options is not None:
        model = amp.initialize(model, verbosity=0, **options)
    model(torch.ones(8, 8))
    assert [product["reason"] for product in report.facts()["would_repay"]] == [reason]


def test_what_stays_float32_is_listed_by_what_it_would_repay():
    model, report = train("O1", keep_fp32="inner")
    facts = report.facts()
    (row,) = facts["would_repay"]
    assert (row["module"], row["dtype"]) == ("inner", "float32")
    assert 0 < facts["half_flops_share"] < 1


@pytest.mark.parametrize(
    ("level", "options", "reason"),
    [("O0", {}, "opt_level O0 is float32 throughout"), ("O2", {"enabled": False}, "enabled=False")],
)
def test_nothing_in_half(level, options, reason):
    model, report = train(level, **options)
    assert report.facts()["sentences"][0].startswith("Nothing ran in half precision: ")
    assert reason in report.facts()["sentences"][0]


def test_nothing_in_half_without_initialize():
    report = amp.report()
    nn.Linear(8, 8)(torch.ones(1, 8))
    assert report.facts()["sentences"][0].startswith(
        "Nothing ran in half precision: amp.initialize was not called in this process."
    )


def test_nothing_in_half_because_another_model_runs():
    report = amp.report()
    used, given = nn.Linear(8, 8), nn.Linear(8, 8)
    given = amp.initialize(given, opt_level="O2", verbosity=0)
    used(torch.ones(1, 8))
    assert "what runs is not what amp.initialize was given" in report.facts()["sentences"][0]


def test_no_block():
    report = amp.report()
    model = nn.Linear(8, 8)
    model, optimizer = initialized(model, "O2")
    model(torch.ones(1, 8)).sum().backward()
    with pytest.warns(UserWarning, match="but no scale_loss block"):
        optimizer.step()
    assert any(s.startswith("No scale_loss block was entered") for s in report.facts()["sentences"])
