"""The corpus against torch: a snippet labelled with a trap misbehaves when it is run at its level, a look-alike does not.

Each snippet is executed as a script, with the names that it leaves open bound to a small model, its optimizer and data;
a witness of its trap says what goes wrong.
"""

import contextlib
import math
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from trap_corpus import FALSE, TRUE

import ampcompat
from ampcompat import amp, fp16_utils, optimizers
from ampcompat._state import state

WIDTH = 8


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    named = {"apex": ampcompat, "apex.amp": amp, "apex.fp16_utils": fp16_utils, "apex.optimizers": optimizers}
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    state.reset()


class Net(nn.Linear):
    """A model whose result is a loss where ``model(x)`` stands for one."""

    def __init__(self, loss=False):
        super().__init__(WIDTH, WIDTH)
        self.loss = loss

    def forward(self, x):
        result = super().forward(x)
        return result.float().mean() if self.loss else result


def names(code, **given):
    torch.manual_seed(0)
    model = Net(loss="loss = model(x)\n" in code)
    x = torch.randn(4, WIDTH)
    flags = {"amp": True, "fp32": False, "evaluate": False, "test_only": False, "distributed": True}
    found = {
        "__name__": "snippet",
        "Net": Net,
        "model": model,
        "opt": torch.optim.SGD(model.parameters(), lr=0.1),
        "args": types.SimpleNamespace(**flags, amp_opt_level="O2"),
        "data": [x],
        "x": x,
        "y": torch.rand(4, WIDTH).round(),
        "n": 2.0,
        "mask": torch.tensor([True, False, False, False] * 2),
        "scores": torch.zeros(4, WIDTH),
        "teacher": Net(),
        "use_amp": True,
        "fp": True,
        "inter": 1.0,
        "correct": 1.0,
        "total": 2.0,
        "one": torch.ones(()),
        "auxiliary": model.weight.sum() * 1e-3,
        "validate": lambda net: None,
        "sys": sys,
    }
    return {**found, **given}


def run(code, **given):
    """The names of a snippet after it ran; its attention is the model, and is called on zeros."""
    attends = "class Attention" in code or "class Norm2d" in code
    if attends:
        made = "model = Attention()\n" if "class Attention" in code else "model = Norm2d()\n"
        made += "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        for start in ("model, opt = amp.initialize", "model = network_to_half", "model.half()\nopt = FP16"):
            code = code.replace(start, made + start)
    variables = names(code, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "snippet.py", "exec"), variables)
        return variables
