"""The autopsy of faults whose culprit is known: it must name it, and the cure must cure."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompat import amp
from ampcompat.explain import explain_overflows


def lose_a_step(model, x, level="O1", loss_of=lambda y: y.float().pow(2).mean(), steps=1, **options):
    """Train ``model`` on ``x`` under the autopsy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain_overflows()
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model, optimizer


def fields(text):
    """The explanations in ``text`` as dicts of lists."""
    found = []
    for block in text.split("ampcompat explain: ")[1:]:
        lines = re.findall(r"^  (\w+) +(.*)$", block, re.MULTILINE)
        entry = {"head": block.splitlines()[0]}
        for name, value in lines:
            entry.setdefault(name, value)
            entry.setdefault("all", []).append(value)
        found.append(entry)
    return found


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(16, 64, bias=False)
        self.wo = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return x + self.wo(F.relu(self.wi(x)))


class T5Like(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.ModuleList([FeedForward(), FeedForward()])
        self.norm = nn.LayerNorm(16)
        with torch.no_grad():
            self.block[1].wo.weight.fill_(100.0)
            self.block[1].wi.weight.fill_(2.0)

    def forward(self, x):
        for block in self.block:
            x = block(x)
        return self.norm(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_wo_of_t5(capsys, level):
    torch.manual_seed(0)
    options = {"loss_scale": "dynamic"} if level == "O3" else {}
    lose_a_step(T5Like(), torch.ones(4, 16), level, **options)
    (entry,) = fields(capsys.readouterr().err)
    assert "(aten::" in entry["what"]
    assert "left the range of float16" in entry["what"]
    assert entry["where"].startswith("block.1.wo (Linear), in T5Like")
    assert "self.wo(F.relu(self.wi(x)))" in entry["line"]
    assert re.match(r".*test_known_culprits.py:\d+: ", entry["line"])
    assert entry["pass"] == "forward"
    magnitude = float(entry["largest"].split()[0])
    assert 100_000 < magnitude < 1e6
    assert "float16 ends at 65504" in entry["largest"]
    assert f"keep_fp32=['block.1{'.wo' if level == 'O1' else ''}']" in entry["cure"]
    assert any("AMPCOMPAT_DTYPE=bfloat16" in line for line in entry["all"])


@pytest.mark.parametrize(("level", "keep"), [("O1", "block.1.wo"), ("O2", None)])
def test_the_cure_of_t5_cures(capsys, monkeypatch, level, keep):
    torch.manual_seed(0)
    if keep is None:
        monkeypatch.setenv("AMPCOMPAT_DTYPE", "bfloat16")
    _, optimizer = lose_a_step(T5Like(), torch.ones(4, 16), level, keep_fp32=keep)
    assert not amp.step_was_skipped(optimizer)
    assert "ampcompat explain" not in capsys.readouterr().err


class Attention(nn.Module):
    def __init__(self, fill=None, sharp=1.0):
        super().__init__()
        self.qk = nn.Linear(8, 16)
        self.fill, self.sharp = fill, sharp

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        scores = torch.bmm(q * self.sharp, k.transpose(1, 2) * self.sharp)
        if self.fill is not None:
            keep = torch.zeros_like(scores)
            scores = scores + (1 - keep) * self.fill
        return torch.softmax(scores, -1) @ x


def test_minus_1e9_in_a_mask(capsys):
    torch.manual_seed(0)
    lose_a_step(Attention(fill=-1e9), torch.randn(2, 4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert "aten::mul" in entry["what"]
    assert "(1 - keep) * self.fill" in entry["line"]
    assert "became NaN in softmax" in entry["then"]
    assert "-1e+09 is -inf in float16" in entry["cure"]
    assert "torch.finfo(scores.dtype).min" in entry["cure"]


def test_a_mask_that_softmax_turns_into_zeros_is_not_blamed(capsys):
    class Masked(Attention):
        def forward(self, x):
            scores = self.qk(x)[..., :8]
            mask = torch.zeros_like(scores)
            mask[..., 4:] = float("-inf")
            return torch.softmax(scores + mask, -1) * 3e38 * 10

    lose_a_step(Masked(), torch.randn(2, 4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert "3e38 * 10" in entry["line"]
    assert "float32" in entry["what"]


def test_exploding_attention_logits(capsys):
    torch.manual_seed(0)
    lose_a_step(Attention(sharp=400.0), torch.randn(2, 4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert "bmm" in entry["what"]
    assert "torch.bmm(q * self.sharp" in entry["line"]
    assert entry["where"] == "Attention itself"
    assert any("register_float_function(torch, 'bmm')" in line for line in entry["all"])
    assert float(entry["largest"].split()[0]) > 65504


class TinyEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return y / (y.abs().amax(-1, keepdim=True) + 1e-8)


def test_an_eps_that_float16_does_not_have(capsys):
    model = TinyEps()
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    lose_a_step(model, torch.randn(4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert "aten::div" in entry["what"]
    assert "+ 1e-8)" in entry["line"]
    assert "eps=1e-08 is 0 in float16" in entry["cure"]
    assert "1e-6" in entry["cure"]


class Head(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last = last

    def forward(self, x):
        return self.last(self.fc(x))


def test_log_of_zero(capsys):
    lose_a_step(Head(lambda y: torch.log(F.relu(y))), torch.randn(4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"].startswith("aten::log gave a result that is not finite, in float32")
    assert "torch.log(F.relu(y))" in entry["line"]
    assert "inf, in float32 as well" in entry["largest"]
    assert "clamp_min" in entry["cure"]


def test_division_by_a_zero_norm(capsys):
    model = Head(lambda y: y / y.norm(dim=-1, keepdim=True))
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    lose_a_step(model, torch.randn(4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert "aten::div" in entry["what"]
    assert "y.norm(dim=-1" in entry["line"]
    assert "a division by zero (4 zeros)" in entry["cure"]
    assert "F.normalize(x, eps=" in entry["cure"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_batch(capsys, value):
    x = torch.randn(4, 8)
    x[2, 3] = value
    lose_a_step(Head(torch.tanh), x)
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"] == "input 0 was not finite before the forward"
    assert entry["where"] == "Head"
    assert "no matter of precision: look at the data loader" in entry["cure"]


def test_a_batch_beyond_float16_at_o2(capsys):
    lose_a_step(Head(torch.tanh), torch.full((4, 8), 1e5), "O2")
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"].startswith("the cast to float16")
    assert entry["largest"].startswith("100000 ")


def test_born_in_backward_only(capsys):
    torch.manual_seed(0)
    lose_a_step(Head(lambda y: y), torch.randn(4, 8), "O2", loss_of=lambda y: (y * 50).sum())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["pass"] == "backward"
    assert "left the range of float16" in entry["what"]
    assert float(entry["largest"].split()[0]) > 65504
    assert "without the loss scale of 65536 it is" in entry["cure"]


def test_the_root_of_zero_is_finite_forward_and_not_backward(capsys):
    model = Head(lambda y: y.float().sum(-1).sqrt())
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    lose_a_step(model, torch.randn(4, 8), "O1", loss_of=lambda y: y.mean())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["pass"] == "backward"
    assert "sum(-1).sqrt()" in entry["line"]
    assert "(x + 1e-6).sqrt()" in entry["cure"]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_where_nothing_skips(capsys, level):
    lose_a_step(Head(lambda y: torch.log(F.relu(y))), torch.randn(4, 8), level)
    (entry,) = fields(capsys.readouterr().err)
    assert entry["head"] == "The loss is not finite."
    assert "log(F.relu(y))" in entry["line"]


def test_a_gradient_at_o0(capsys):
    model = Head(lambda y: y.sum(-1).sqrt())
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    lose_a_step(model, torch.randn(4, 8), "O0", loss_of=lambda y: y.mean())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["head"] == "A gradient is not finite."
    assert "sqrt" in entry["line"]


def test_weights_that_an_earlier_step_lost(capsys):
    model = Head(torch.tanh)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    lose_a_step(model, torch.randn(4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"] == "parameter fc.weight was not finite before the forward"


def test_a_buffer_that_is_not_finite(capsys):
    model = Head(torch.tanh)
    model.register_buffer("centre", torch.tensor(float("inf")))
    model.last = lambda y: torch.tanh(y) + model.centre
    lose_a_step(model, torch.randn(4, 8))
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"] == "buffer centre was not finite before the forward"
    assert entry["cure"].startswith("running statistics of a batch that was not finite, or an average")


def log_of_zero_outside(y):
    p = torch.sigmoid(y.float()) * 0
    return -torch.log(p).mean()


@pytest.mark.parametrize(
    ("loss_of", "line"),
    [(log_of_zero_outside, "torch.log(p)"), (lambda y: (y.float() * 0).sum(-1).sqrt().mean(), ".sqrt()")],
)
def test_a_loss_function_is_watched_after_the_first_time(capsys, loss_of, line):
    lose_a_step(Head(torch.tanh), torch.randn(4, 8), loss_of=loss_of, steps=3)
    first, second = fields(capsys.readouterr().err)
    assert "That code is watched from now on" in first["head"]
    assert "outside of any module" in second["where"]
    assert line in second["line"]
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_model_that_overflows_while_the_loss_function_is_watched(capsys):
    """Its output comes into the code that is watched: no fault of that code, nor of the data."""
    model, optimizer = lose_a_step(
        Head(torch.tanh), torch.randn(4, 8), loss_of=lambda y: (y.float() * 0).sum(-1).sqrt().mean()
    )
    model.last = lambda y: y
    with amp.scale_loss(model(torch.full((4, 8), 1e9)).float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    first, second = fields(capsys.readouterr().err)
    assert "That code is watched from now on" in first["head"]
    assert second["what"].startswith("the cast to float16")
    assert "self.last(self.fc(x))" in second["line"]
