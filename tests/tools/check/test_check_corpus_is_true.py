"""The corpus against torch: a snippet labelled with a trap misbehaves when it is run at its level.

Each snippet is executed as a script, with the names that it leaves open bound to a small model, its optimizer and data;
a witness of its trap says what goes wrong.
"""

import sys
import warnings

import pytest
import torch
from amp_training import reset
from torch import nn
from trap_corpus import FALSE, TRUE

import ampcompat
from ampcompat import amp, fp16_utils, optimizers

WIDTH = 8
SGD = "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    named = {"apex": ampcompat, "apex.amp": amp, "apex.fp16_utils": fp16_utils, "apex.optimizers": optimizers}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    reset()


class Net(nn.Linear):
    """A model whose result is a loss where ``model(x)`` stands for one."""

    def __init__(self, loss=False):
        super().__init__(WIDTH, WIDTH)
        self.loss = loss

    def forward(self, x):
        result = super().forward(x)
        return result.float().pow(2).mean() if self.loss else result


def run(name, code):
    """The names of a snippet after it ran, what it raised, and how far the step moved each parameter."""
    torch.manual_seed(0)
    if "class Attention" in code:
        for start in ("model, opt = amp.init", "model = network_to_half", "model.half()\nopt = FP16"):
            code = code.replace(start, f"model = Attention()\n{SGD}{start}")
    model = Net(loss="loss = model(x)\n" in code)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    found = {
        "__name__": "snippet",
        "Net": Net,
        "model": model,
        "opt": opt,
        "data": [x],
        "x": x,
        "n": 2.0,
        "fp": True,
        "wide": False,
    }
    found |= {
        "y": torch.rand(4, WIDTH).round(),
        "mask": torch.tensor([True] + [False] * 7),
        "scores": torch.zeros(4, 8),
    }
    start = [p.detach().clone() for p in model.parameters()]
    problem = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(code, name, "exec"), found)
            if "def forward(self, x, mask)" in code:
                wrapped, zeros = isinstance(found["model"], nn.Sequential), torch.zeros(4, WIDTH)
                attention = found["model"][-1] if wrapped else found["model"]
                zeros = zeros.half() if "FP16_Optimizer" in code else zeros
                found["out"] = attention(zeros, torch.zeros(4, 4, dtype=torch.bool))
        except Exception as raised:
            problem = raised
    pairs = zip(amp.master_params(found["opt"]), start, strict=False)
    moved = [(p.detach() - before).norm() for p, before in pairs if p.shape == before.shape]
    return found, problem, moved


RAISES = {
    "loss_id_out_of_range": "loss_id=",
    "wrapped_before_initialize": "already wrapped",
    "whole_checkpoint": "Unexpected key",
    "step_in_block": "inside its scale_loss block",
    "level_as_enabled": "enabled",
    "misspelt_level": "opt_level",
    "banned_cross_entropy": "binary_cross_entropy",
}
RAISING = [name for name, (trap, _) in TRUE.items() if trap in RAISES]


@pytest.mark.parametrize("name", RAISING)
def test_it_is_refused(name):
    trap, code = TRUE[name]
    _, problem, _ = run(name, code)
    assert problem is not None
    assert any(word in str(problem) for word in RAISES[trap].split("|")), problem


FILLS = [n for n, (trap, code) in TRUE.items() if trap == "overflowing_fill" and "class Attention" in code]


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_out_of_range_raises_when_the_model_is_called(name):
    _, problem, _ = run(name, TRUE[name][1])
    assert isinstance(problem, RuntimeError)
    assert "overflow" in str(problem)


def test_a_large_number_times_a_half_mask_is_infinite():
    found, problem, _ = run("mask", TRUE["mask times a large number"][1])
    assert problem is None
    assert torch.isinf(found["scores"]).any()


def norms(name, code):
    _, problem, moved = run(name, code)
    assert problem is None
    return torch.stack(moved)


MASTERS_MATTER = ("clip_of_model_params", "edit_of_model_gradients")
UNTOUCHED = [n for n, (trap, code) in TRUE.items() if trap in MASTERS_MATTER and '"O2"' in code]


def without_what_is_wrong(code):
    """The snippet with a step right below its block, or without the clip or loop of its method."""
    lines = code.splitlines(keepends=True)
    if "class Trainer" in code:
        start = next(i for i, line in enumerate(lines) if "def update" in line)
        end = next(i for i, line in enumerate(lines) if "self.opt.step()" in line)
        return "".join([*lines[: start + 1], *lines[end:]])
    block = next(i for i, line in enumerate(lines) if "scaled.backward()" in line)
    return "".join([*lines[: block + 1], "    opt.step()\n"])


@pytest.mark.parametrize("name", UNTOUCHED)
def test_model_gradients_change_no_step_at_o2(name):
    """What a script does to the model's gradients at O2 has no effect; at O1 it has."""
    code = TRUE[name][1]
    plain = without_what_is_wrong(code)
    hard = code.replace("1.0)", "0.01)" if "value" in name else "0.5)").replace("(-1, 1)", "(-1e-4, 1e-4)")
    assert torch.equal(norms(name, hard), norms(name, plain))
    assert not torch.equal(norms(name, hard.replace('"O2"', '"O1"')), norms(name, plain.replace('"O2"', '"O1"')))


@pytest.mark.parametrize("name", ["backward after the block at O2", "no block at O2"])
def test_nothing_is_trained_at_o2(name):
    assert norms(name, TRUE[name][1]).max() == 0


def test_a_second_loss_without_a_block_trains_nothing_at_o2():
    code = TRUE["a second loss without a block at O2"][1]
    without = "".join(line for line in code.splitlines(keepends=True) if "noisy_loss.backward" not in line)
    assert torch.equal(norms("both", code), norms("one", without))
    at_o1 = [norms(name, text.replace('"O2"', '"O1"')) for name, text in (("both", code), ("one", without))]
    assert not torch.equal(*at_o1)


def test_gradients_that_no_block_unscales_are_too_large():
    name = "backward after the block at O1"
    assert norms(name, TRUE[name][1]).min() > 1000


CLIPPED = [name for name, (trap, _) in TRUE.items() if trap == "clip_of_scaled_gradients"]


@pytest.mark.parametrize("name", [*CLIPPED, "the wrong loss"])
def test_gradients_are_smaller_by_the_scale(name):
    lines = TRUE["clip in the block"][1].splitlines(keepends=True)
    right = norms(name, "".join(line for line in lines if "clip" not in line))
    assert right.min() > 0
    assert norms(name, TRUE[name][1]).max() < right.max() / 1000


ALONE = [name for name, code in FALSE.items() if "opt.step()" in code]


@pytest.mark.parametrize("name", ALONE)
def test_look_alikes_that_train_do_so(name):
    moved = norms(name, FALSE[name])
    assert moved.isfinite().all()
    assert (moved.max() > 0) == (name != "gradients cleared")
