"""The corpus against torch: a snippet labelled with a trap misbehaves when it is run at its level.

Each snippet is executed as a script, with the names that it leaves open bound to a small model, its optimizer and data;
a witness of its trap says what goes wrong.
"""

import sys
import types
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
    # A real one needs a process group; it is its type that initialize looks at.
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", lambda self, module: nn.Module.__init__(self))
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
    code = code.replace(".cuda()", "")
    for kind in ("Attention", "Norm2d"):
        if f"class {kind}" in code:
            for start in ("model, opt = amp.init", "model = network_to_half", "model.half()\nopt = FP16"):
                code = code.replace(start, f"model = {kind}()\n{SGD}{start}")
    model = Net(loss="loss = model(x)\n" in code)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    flags = types.SimpleNamespace(amp=True, fp32=False, evaluate=False, test_only=False, distributed=True)
    found = {
        "__name__": "snippet",
        "Net": Net,
        "model": model,
        "opt": opt,
        "args": flags,
        "data": [x],
        "x": x,
        "n": 2.0,
    }
    found |= {
        "y": torch.rand(4, WIDTH).round(),
        "mask": torch.tensor([True] + [False] * 7),
        "scores": torch.zeros(4, 8),
    }
    found["auxiliary"] = model(x.half().float()).float().sum() * 1e-9 if "auxiliary" in code else None
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
            elif "class Norm2d" in code:
                with torch.no_grad():
                    found["model"].f.bias.zero_()
                found["out"] = found["model"](torch.zeros(1, 3, 2, 2))
        except Exception as raised:
            problem = raised
    pairs = zip(amp.master_params(found["opt"]), start, strict=False)
    moved = [(p.detach() - before).norm() for p, before in pairs if p.shape == before.shape]
    return found, problem, moved


RAISES = {
    "level_as_enabled": "enabled",
    "misspelt_level": "opt_level",
    "half_by_hand": "float32|float16|half",
    "wrapped_before_initialize": "Parallel",
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


@pytest.mark.parametrize("name", ["epsilon below a product", "epsilon in a root at O2", "epsilon across functions"])
def test_an_epsilon_that_vanishes_divides_by_zero(name):
    code = TRUE[name][1].replace("x.half()", "(x * 0).half()")
    code = code.replace("self.q, self.k =", "torch.manual_seed(0)\n        self.q, self.k =")
    code = code.replace("nn.Linear(8, 8), nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)")
    found, problem, _ = run(name, code)
    assert problem is None
    out = found["y"] if name == "epsilon across functions" else found["out"]
    assert not torch.isfinite(out).all()


def test_a_limit_that_vanishes_limits_nothing():
    small = torch.zeros(2).half().clamp(min=1e-12)
    assert (small == 0).all()


@pytest.mark.parametrize("name", [n for n, (trap, _) in TRUE.items() if trap == "adam_eps_in_half"])
def test_adam_at_O3_ends_in_nan(name):
    found, problem, _ = run(name, TRUE[name][1])
    assert problem is None
    model = found["model"]
    (model(torch.zeros(2, WIDTH)).float().sum()).backward()  # the weight's gradients are zero
    found["opt"].step()
    assert torch.isnan(model.weight).any()


def test_a_copied_optimizer_steps_nothing_of_the_model():
    found, _, _ = run("copy", TRUE["copy of the optimizer"][1])
    held = {id(p) for p in [*found["model"].parameters(), *amp.master_params(found["opt"])]}
    assert held.isdisjoint(id(p) for group in found["best"].param_groups for p in group["params"])


def norms(name, code):
    _, problem, moved = run(name, code)
    assert problem is None
    return torch.stack(moved)


UNTOUCHED = [n for n, (trap, _) in TRUE.items() if trap in ("clip_of_model_params", "edit_of_model_gradients")]


@pytest.mark.parametrize("name", UNTOUCHED)
def test_model_gradients_change_no_step_at_o2(name):
    """What a script does to the model's gradients at O2 has no effect; at O1 it has."""
    code = TRUE[name][1]
    lines = code.splitlines(keepends=True)
    block = next(i for i, line in enumerate(lines) if "scaled.backward()" in line)
    plain = "".join([*lines[: block + 1], "    opt.step()\n"])
    hard = code.replace("1.0)", "0.01)" if "value" in name else "0.5)").replace("(-1, 1)", "(-1e-4, 1e-4)")
    assert torch.equal(norms(name, hard), norms(name, plain))
    assert not torch.equal(norms(name, hard.replace('"O2"', '"O1"')), norms(name, plain.replace('"O2"', '"O1"')))


@pytest.mark.parametrize("name", ["clip in the block", "the wrong loss"])
def test_gradients_are_smaller_by_the_scale(name):
    lines = TRUE["clip in the block"][1].splitlines(keepends=True)
    right = norms(name, "".join(line for line in lines if "clip" not in line))
    assert right.min() > 0
    assert norms(name, TRUE[name][1]).max() < right.max() / 1000


@pytest.mark.parametrize(("scale", "lost"), [(1.0, True), (65536.0, False)])
def test_an_unscaled_loss_loses_what_is_small(scale, lost):
    weight = torch.full((1,), 0.5, requires_grad=True)
    ((weight.half() * 1e-9).float().sum() * scale).backward()
    assert (weight.grad == 0) == lost


ALONE = [name for name, code in FALSE.items() if "amp.initialize" in code and "scale_loss" in code]


@pytest.mark.parametrize("name", ALONE)
def test_look_alikes_that_train_do_so(name):
    code = FALSE[name].replace("args.fp32", "False").replace("not fp:", "False:").replace("if fp:", "if True:")
    moved = norms(name, code)
    assert moved.isfinite().all()
    assert (moved.max() > 0) == (name != "gradients zeroed")
