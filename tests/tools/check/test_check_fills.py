"""Fill values beyond half, in every call that takes one: what torch does with them, and what the check says."""

import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ampcompat.tools.check import scan_source
from ampcompat.tools.check.traps.fills import INFINITE, REFUSED

HEAD = "import numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom apex import amp\n"
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
#: Half tensors refuse these.
RAISE = [
    "s.masked_fill(m, -1e10)",
    "torch.masked_fill(s, m, value=-1e10)",
    "s.masked_fill_(m, -1e10)",
    "s.index_fill(0, i, -1e10)",
    "s.scatter(1, i[None], -1e10)",
    "torch.scatter(s, 1, i[None], value=-1e10)",
    "s.fill_(-1e10)",
    "torch.fill(s, -1e10)",
    "s.fill_diagonal_(-1e10)",
    "torch.full((2, 2), -1e10, dtype=s.dtype)",
    "torch.full((2, 2), -1e10, dtype=torch.half)",
    "torch.full_like(s, -1e10)",
    "torch.full_like(w, -1e10, dtype=s.dtype)",
    "s.new_full((2, 2), -1e10)",
    "F.pad(s, (1, 1), value=-1e10)",
    "F.pad(s, (1, 1), 'constant', -1e10)",
    "torch.nn.utils.rnn.pad_sequence([s, s[:1]], padding_value=-1e10)",
    "s.clamp(min=-1e10)",
    "torch.clamp(s, 0, 1e10)",
    "s.clamp_(max=1e10)",
    "s.clamp_min(-1e10)",
    "torch.clamp_max(s, 1e10)",
    "s.clip(-1e10, 0)",
    "F.threshold(s, 0.5, -1e10)",
    "F.hardtanh(s, -1e10, 1e10)",
    "s.masked_fill(m, -2**32 + 1)",
    "s.masked_fill(m, torch.finfo(torch.float32).min)",
    "s.masked_fill(m, LOW)",
    "s.masked_fill(m, float(-1e10))",
    "s.masked_fill(m, float('-1e10'))",
    "s.masked_fill(m, -float(1e10))",
    "s.masked_fill(m, np.float32(-1e10))",
]
#: In these the value becomes inf, or some torch refuses it.
BECOME_INF = [
    "(s / 0).nan_to_num(1e10)",
    "torch.nan_to_num(s / 0, neginf=-1e10, nan=1e10)",
    "s.new_tensor(-1e10)",
    "torch.tensor(-1e10, dtype=s.dtype)",
    "torch.scalar_tensor(-1e10, dtype=s.dtype)",
    "torch.where(m, s, -1e10)",
    "torch.where(m, -1e10, s)",
    "s.where(m, -1e10)",
    "(1 - m.to(s.dtype)) * -1e10",
    "1e10 * (1.0 - m.int().to(dtype=s.dtype))",
]
#: Statements in which it does.
ITEMS = ["s[m] = -1e10", "s[~m] = -1e10", "s[:, s[0] == 0] = -1e10", "s[0] = -1e10", "s[m] -= 1e10"]
FILLS = [*RAISE, *BECOME_INF]


def names():
    """A half tensor, a float32 one, a mask, an index, and a constant."""
    return {
        "s": torch.zeros(2, 2).half(),
        "w": torch.zeros(2, 2),
        "m": torch.tensor([[True, False], [False, False]]),
        "i": torch.tensor([0]),
        "np": np,
        "torch": torch,
        "F": F,
        "LOW": -1e9,
    }


@pytest.mark.parametrize("code", RAISE)
def test_torch_refuses_it_in_half(code):
    with pytest.raises(RuntimeError, match="overflow"):
        eval(code, names())


@pytest.mark.parametrize("code", [*(f"s = {code}" for code in BECOME_INF), *ITEMS])
def test_torch_makes_it_infinite_in_half_or_refuses_it(code):
    bound = names()
    try:
        exec(code, bound)
        is_refused = False
    except RuntimeError as problem:  # torch 2.4 refuses most of them
        is_refused = "overflow" in str(problem)
    assert is_refused or torch.isinf(bound["s"]).any()


def traps(code, start="s = s.half()\n"):
    body = textwrap.indent(start + code, "    ")
    found = scan_source(f"{HEAD}{INITIALIZE}LOW = -1e9\ndef f(model, s, m, i, w):\n{body}\n")
    return {f.name: (f.level, f.note) for f in found if f.kind != "symbol"}


@pytest.mark.parametrize("code", [*FILLS, *ITEMS])
def test_it_is_found(code):
    level, note = traps(code)["overflowing_fill"]
    assert level == "warning"
    assert ("becomes inf" not in note) == (code in RAISE)


@pytest.mark.parametrize("code", [*FILLS, *ITEMS])
def test_it_is_right_in_float32(code):
    if "dtype=" in code:
        code = code.replace("dtype=s.dtype", "dtype=w.dtype").replace("dtype=torch.half", "dtype=torch.float32")
    assert traps(code, "s = s.float()\nw = w.float()\n") == {}


def test_every_place_of_a_value_is_tried():
    tried = {name for name in (*REFUSED, *INFINITE) if any(f"{name}(" in f or f"{name}_(" in f for f in FILLS)}
    assert tried == {*REFUSED, *INFINITE}


@pytest.mark.parametrize("form", ["clamp(min=-1e10)", "masked_fill(m, -1e10)", "new_full((2,), -1e10)"])
def test_a_product_at_o1_is_half_for_certain(form):
    assert traps(f"y = s.{form}", "s = torch.matmul(s, w) / 8\n")["overflowing_fill"][0] == "error"


@pytest.mark.parametrize("start", ["s = s @ w\n", "s = torch.bmm(s, w)\n", "s = self.out(s).view(-1)\n"])
def test_an_item_of_what_a_layer_returns(start):
    assert set(traps("s[i] = -1e10", start)) == {"overflowing_fill"}


@pytest.mark.parametrize("parameters", ["s, m, low=-1e10", "s, m, *, low=-1e10", "s, m, low=-1e10, high=0"])
def test_the_default_of_a_parameter(parameters):
    code = f"{HEAD}{INITIALIZE}def f({parameters}):\n    return s.masked_fill(m, low)\n"
    assert [f.name for f in scan_source(code) if f.kind != "symbol"] == ["overflowing_fill"]


KEPT = """
class Net(torch.nn.Module):
    LOW = -1e9
    def __init__(self, low=-1e9, high=1e4):
        self.low, self.high, self.lowest = low, high, float("-1e9")
    def forward(self, s, m):
        return s.masked_fill(m, {})
class Other:
    LOW = -1e4
"""


@pytest.mark.parametrize("value", ["self.LOW", "Net.LOW", "self.low", "self.lowest"])
def test_a_value_that_a_class_keeps(value):
    found = scan_source(f"{HEAD}{INITIALIZE}{KEPT.format(value)}")
    assert [f.name for f in found if f.kind != "symbol"] == ["overflowing_fill"]


@pytest.mark.parametrize("value", ["self.high", "Other.LOW", "self.other", "Missing.LOW", "other.low"])
def test_a_value_that_a_class_does_not_keep_or_that_fits(value):
    found = scan_source(f"{HEAD}{INITIALIZE}{KEPT.format(value)}")
    assert [f.name for f in found if f.kind != "symbol"] == []


def test_an_item_of_what_forward_is_given():
    code = f"{HEAD}{INITIALIZE}def forward(self, s, m):\n    s[m] = -1e10\n"
    assert [f.name for f in scan_source(code) if f.kind != "symbol"] == ["overflowing_fill"]


RIGHT = [
    "best = torch.zeros(4)\nbest[m] = 1e10",
    "mask = torch.triu(torch.ones(4, 4), 1).to(s.device)\ny = mask.masked_fill(mask == 1, -1e10)",
    "y = torch.full((4,), -1e10)",
    "y = torch.full_like(i, 100000, dtype=torch.long)",
    "i = i.long()\ny = i.clamp(max=100000)",
    "count = torch.zeros(4, dtype=torch.int64)\ncount.fill_(100000)",
    "y = np.where(m, s, -1e10)",
    "y = np.clip(s, 0, 1e10)",
    "y = s.clamp(-1e4, 1e4)",
    "s[i] = 1e10",
    "self.fill(1e10)",
    "y = s.masked_fill(m, float('-inf'))",
    "y = s.masked_fill(m, torch.finfo(s.dtype).min)",
    "if s.dtype == torch.float32:\n    y = torch.full_like(s, -1e10)",
    "y = torch.where(m, 0.0, -1e10)",
    "a = np.zeros((3, 3))\na[a == 0] = -1e10",
    "a = np.where(m, s, 0)\ny = a.clip(-1e10, 1e10)",
    "a = model(s).cpu().numpy()\nb = np.asarray(a)\nb[b > 0] = 1e10",
    "a = s.numpy()\nb = a @ a.T\nb[b > 0] = 1e10",
    "y = w.float()\ny = s + y\ny = y.masked_fill(m, -1e10)",
    "y = s + i - w.float()\ny.masked_fill_(m, -1e10)",
    "y = s + w.to(torch.float32)\ny.masked_fill_(m, -1e10)",
    "y = i.masked_fill(i == 102, 100000)",
    "i = i.clamp(min=0)\ny = i.new_full((2,), 100000)\nz = i != 102",
    "y = torch.arange(4).clamp(max=100000)",
    "y = torch.randint(4, (2,))\ny[y == 0] = 100000",
    "y = (1 - w.float()) * -1e10",
    "y = (1 - i.to(device)) * 100000",
    "y = (2 - i.to(s.dtype)) * 1e10",
    "y = s.masked_fill(m, float(n))",
    "y = s.masked_fill(m, float('x'))",
]
#: Nothing here shows that the tensor is float32, or of integers.
MAY_BE_HALF = [
    "y = s * w.float().mean()\ny = y.masked_fill(m, -1e10)",
    "y = s + w.float().item()\ny = y.masked_fill(m, -1e10)",
    "y = s + float(n)\ny = y.masked_fill(m, -1e10)",
    "if wide:\n    w = w.float()\ny = s + w\ny = y.masked_fill(m, -1e10)",
    "y = s.masked_fill(s == 0, -100000)",
    "y = s.masked_fill(i == 102, -100000)",
    "y = s.masked_fill(s == 102, -1e10)",
    "z = s == 102\ns = self.embed(s)\ny = s.masked_fill(m, 100000)",
]


@pytest.mark.parametrize("code", RIGHT)
def test_what_meets_no_half(code):
    assert traps(code, "") == {}


@pytest.mark.parametrize("code", MAY_BE_HALF)
def test_what_may_meet_half(code):
    assert set(traps(code, "")) == {"overflowing_fill"}


@pytest.mark.parametrize(("level", "found"), [("O1", {"overflowing_fill"}), ("O2", set()), ("O3", set())])
@pytest.mark.parametrize(
    "use",
    [
        "y = model(s).masked_fill(m, -1e10)\n",
        "y = model(s)\ny[y == 0] = -1e10\n",
        "y = torch.clamp(model(s), max=1e10)\n",
    ],
)
def test_what_the_model_returns(use, level, found):
    code = f"{HEAD}{INITIALIZE.replace('O1', level)}m = s == 0\n{use}"
    assert {f.name for f in scan_source(code) if f.kind != "symbol"} == found


@pytest.mark.parametrize(
    ("initialize", "use"),
    [
        (INITIALIZE, "y = other(s).masked_fill(m, -1e10)\n"),
        (INITIALIZE, "def f(model, s, m):\n    return model(s).masked_fill(m, -1e10)\n"),
        (INITIALIZE.replace(")", ", cast_model_outputs=torch.half)"), "y = model(s).masked_fill(m, -1e10)\n"),
        (INITIALIZE.replace(")", ", **options)"), "y = model(s).masked_fill(m, -1e10)\n"),
    ],
)
def test_what_another_model_returns_or_the_model_in_half(initialize, use):
    code = f"{HEAD}{initialize.replace('O1', 'O2')}{use}"
    assert [f.name for f in scan_source(code) if f.kind != "symbol"] == ["overflowing_fill"]


@pytest.mark.parametrize(("level", "found"), [("O1", set()), ("O2", {"overflowing_fill"})])
@pytest.mark.parametrize(
    "use",
    [
        "y = F.softmax(s, -1).clamp(max=1e10)\n",
        "y = F.log_softmax(s, -1)\ny[y > 0] = -1e10\n",
        "with amp.disable_casts():\n    y = torch.matmul(s, w).clamp(max=1e10)\n",
        "with torch.autocast('cuda', enabled=False):\n    y = torch.matmul(s, w).clamp(max=1e10)\n",
    ],
)
def test_what_o1_runs_in_float32(use, level, found):
    code = f"{HEAD}{INITIALIZE.replace('O1', level)}{use}"
    assert {f.name for f in scan_source(code) if f.kind != "symbol"} == found
