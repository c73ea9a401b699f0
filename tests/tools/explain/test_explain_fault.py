"""Faults whose culprit is known: explain must name it, and its hint must help."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from amp_training import initialized, last_words, make_step
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_as, explain_overflows
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.hints import hints
from ampcompat.tools.explain.in_float32 import BFLOAT16
from ampcompat.tools.explain.places import NOWHERE
from ampcompat.tools.explain.setting import Setting


def lose_a_step(model, x, level="O1", loss_of=lambda y: y.float().pow(2).mean(), steps=1, **options):
    """Train ``model`` on ``x`` under explain."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain_overflows()
    for _ in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    for message in last_words()[:-1]:  # what may have been an ordinary back-off
        message.emit(as_json=False)
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
    assert re.match(r".*test_explain_fault.py:\d+: ", entry["line"])
    assert entry["pass"] == "forward"
    magnitude = float(entry["largest"].split()[0])
    assert 100_000 < magnitude < 1e6
    assert "float16 ends at 65504" in entry["largest"]
    first = "keep_fp32=['block.1.wo']" if level == "O1" else "AMPCOMPAT_DTYPE=bfloat16"  # norm is given it in half
    assert first in entry["hint"]
    assert any("AMPCOMPAT_DTYPE=bfloat16" in line for line in entry["all"])


@pytest.mark.parametrize(("level", "keep"), [("O1", "block.1.wo"), ("O2", None)])
def test_the_hint_for_t5_helps(capsys, monkeypatch, level, keep):
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


class Head(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last = last

    def forward(self, x):
        return self.last(self.fc(x))


def zeroed(last):
    """A head whose layer returns zeros."""
    model = Head(last)
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    return model


def with_infinite_buffer():
    model = Head(lambda y: torch.tanh(y) + model.centre)
    model.register_buffer("centre", torch.tensor(float("inf")))
    return model


class Masked(Attention):
    """A mask that softmax turns into zeros, and a product beyond float32."""

    def forward(self, x):
        scores = self.qk(x)[..., :8]
        mask = torch.zeros_like(scores)
        mask[..., 4:] = float("-inf")
        return torch.softmax(scores + mask, -1) * 3e38 * 10


class Normed(nn.Module):
    """A layer whose result, if it is not finite, goes into the running statistics of a batch norm too."""

    def __init__(self, weight=None, **statistics):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        if weight is not None:
            nn.init.constant_(self.fc.weight, weight)
        for name, value in statistics.items():
            getattr(self.bn, name).fill_(value)

    def forward(self, x):
        return self.bn(self.fc(x))


class LogOfZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        divisor = x * 0
        return grad / divisor


class UsesFunction(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.Module()
        self.act.forward = lambda x: LogOfZero.apply(x)
        self.after = after

    def forward(self, x):
        return self.after(self.act(self.fc(x)))


class InfForZero(torch.autograd.Function):
    """Its backward hands an op of torch's the fault: no line of its own runs when that is found."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


class Whole(nn.Linear):
    def forward(self, x):
        return InfForZero.apply(super().forward(x))


class Scaled(nn.Linear):
    """Neither parameter nor buffer nor input is at fault: a tensor that it holds as an attribute."""

    scale = torch.full((8,), float("nan"))

    def forward(self, x):
        return super().forward(x) * self.scale


def of_torchs_modules(weight):
    """A model whose forward has no line of the script's."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    nn.init.constant_(model[1][0].weight, weight)
    return model


def never_in_training():
    """A batch norm that is not in training when it runs, in a model that is."""
    model = Normed(running_mean=float("nan"))
    model.bn.register_forward_pre_hook(lambda bn, args: bn.eval() and None)
    return model


BATCH = torch.linspace(-1, 1, 32).view(4, 8)
LARGE = torch.full((4, 8), 50.0)
WORDS = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
# What is trained, and what is told: each is a part of the line of that name, or of any line.
CULPRITS = {
    "-1e9 in a mask": (
        lambda: Attention(fill=-1e9),
        {"x": WORDS},
        {"what": "aten::mul", "line": "(1 - keep) * self.fill", "then": "became NaN in softmax() of Attention"},
        {"-1e+09 is -inf in float16: write -1e4 in place of it"},
    ),
    "exploding logits": (
        lambda: Attention(sharp=400.0),
        {"x": WORDS},
        {"what": "bmm", "line": "torch.bmm(q * self.sharp", "where": "Attention itself"},
        {"register_float_function(torch, 'bmm')", "float16 ends at 65504"},
    ),
    "log of zero": (
        lambda: Head(lambda y: torch.log(F.relu(y))),
        {},
        {"what": "aten::log gave a result that is not finite, in float32", "line": "torch.log(F.relu(y))"},
        {"inf, in float32 too with these inputs", "clamp_min"},
    ),
    "log of zero where nothing skips": (
        lambda: Head(lambda y: torch.log(F.relu(y))),
        {"level": "O3"},
        {"head": "The loss of step 1 is inf.", "line": "log(F.relu(y))"},
    ),
    "log of zero at O0": (
        lambda: Head(lambda y: torch.log(F.relu(y))),
        {"level": "O0"},
        {"head": "The loss of step 1 is inf.", "line": "log(F.relu(y))"},
    ),
    "division by a zero norm": (
        lambda: zeroed(lambda y: y / y.norm(dim=-1, keepdim=True)),
        {},
        {"what": "aten::div", "line": "y.norm(dim=-1", "hint": "a division by zero (4 zeros)"},
        {"add an eps to the denominator, as in / (... + 1e-3)"},
    ),
    "a gradient beyond float16": (
        lambda: Head(lambda y: y),
        {"level": "O2", "loss_of": lambda y: (y * 50).sum()},
        {
            "pass": "backward",
            "what": "a gradient is too large for float16",
            "hint": "without the loss scale of 8192 the gradient is",
        },
        {"float16 ends at 65504"},
    ),
    "the root of zero at O0": (
        lambda: zeroed(lambda y: y.sum(-1).sqrt()),
        {"level": "O0", "loss_of": lambda y: y.mean()},
        {"head": "A gradient of step 1 is not finite.", "line": "sqrt"},
    ),
    "a buffer": (
        with_infinite_buffer,
        {},
        {"what": "buffer centre was not finite before the forward"},
        {"running statistics of a batch that was not finite, or an average"},
    ),
    "a mask that softmax turns into zeros": (Masked, {"x": WORDS}, {"what": "float32", "line": "3e38 * 10"}),
    # A training batch norm reads no statistics: the op that overflows is at fault.
    "statistics that an earlier batch spoiled": (
        lambda: Normed(1e4, running_var=float("inf")),
        {"x": LARGE, "level": "O2"},
        {"where": "fc (Linear), in Normed"},
    ),
    "statistics that an evaluating model reads": (
        lambda: Normed(running_mean=float("nan")).eval(),
        {},
        {"what": "buffer bn.running_mean was not finite before the forward"},
    ),
    "statistics that an evaluating norm reads": (
        never_in_training,
        {},
        {"what": "buffer bn.running_mean was not finite before the forward"},
    ),
    "a backward of torch's modules": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        {"x": torch.ones(4, 8), "level": "O2", "loss_of": lambda y: y.sum() * 6.0},
        {"pass": "backward", "where": "0 (Linear), in Sequential", "line": "loss_of(model(x))"},
    ),
    "a constant of a module": (
        lambda: Scaled(8, 8),
        {},
        {
            "what": "a tensor given to mul (float32 of shape (8,)) was not finite before",
            "where": "Scaled itself",
            "line": ": return super().forward(x) * self.scale",
        },
    ),
    **{
        f"statistics that the batch itself spoils at {level}": (
            lambda level=level: Normed(1e38 if level == "O0" else 1e4),
            {"x": LARGE, "level": level},
            {"what": "linear (aten::", "where": "fc (Linear), in Normed", "line": "self.bn(self.fc(x))"},
        )
        for level in ("O0", "O2", "O3")
    },
    **{
        f"torch's modules at {level}": (
            lambda level=level: of_torchs_modules(1e38 if level == "O0" else 6e4),
            {"x": torch.full((4, 8), 100.0), "level": level},
            {"where": "1.0 (Linear), in Sequential", "line": ": with amp.scale_loss(loss_of(model(x))"},
        )
        for level in ("O0", "O1", "O2")
    },
    **{
        f"the backward of a function, {followed} at {level}": (
            lambda after=after: UsesFunction(after),
            {"level": level},
            {
                "pass": "backward",
                "what": "LogOfZero (aten::div) gave a result that is not finite",
                "where": "act (Module), in UsesFunction",
                "line": ": return grad / divisor",
            },
        )
        for level in ("O0", "O1", "O2")
        for followed, after in (("last", lambda y: y), ("followed", lambda y: y * 0.5))
    },
    **{
        f"a function as the model at {level}": (
            lambda: Whole(8, 8),
            {"level": level},
            {"where": "Whole itself", "line": ': return grad * float("inf")'},
        )
        for level in ("O0", "O1", "O2")
    },
}


@pytest.mark.parametrize("name", CULPRITS)
def test_the_culprit_and_its_hint(capsys, name):
    torch.manual_seed(0)
    make, options, lines, *parts = CULPRITS[name]
    lose_a_step(make(), **{"x": BATCH, "steps": 5, **options})
    (entry,) = fields(capsys.readouterr().err)
    for label, part in lines.items():
        assert part in entry[label]
    for part in set[str]().union(*parts):
        assert any(part in line for line in entry["all"])


def log_of_zero_outside(y):
    p = torch.sigmoid(y.float()) * 0
    return -torch.log(p).mean()


@pytest.mark.parametrize(
    ("loss_of", "line"),
    [(log_of_zero_outside, "torch.log(p)"), (lambda y: (y.float() * 0).sum(-1).sqrt().mean(), ".sqrt()")],
)
def test_a_loss_function_is_watched_after_the_first_time(capsys, loss_of, line):
    lose_a_step(Head(torch.tanh), torch.randn(4, 8), loss_of=loss_of, steps=5)
    *first, second = fields(capsys.readouterr().err)
    # A gradient that is not finite may be an ordinary back-off: that is not told.
    assert all(entry["head"].endswith("The next steps, 50 at most, are watched as they run.") for entry in first)
    assert "outside of any module" in second["where"]
    assert line in second["line"]


def test_a_model_overflows_while_the_loss_is_watched(capsys):
    """Its output comes into the code that is watched: no fault of that code, nor of the data."""
    model, optimizer = lose_a_step(
        Head(torch.tanh), torch.randn(4, 8), loss_of=lambda y: (y.float() * 0).sum(-1).sqrt().mean(), steps=3
    )
    model.last = lambda y: y
    make_step(optimizer, model(torch.full((4, 8), 1e9)).float().pow(2).mean())
    (entry,) = fields(capsys.readouterr().err)
    assert "is too large for float16, to which linear casts it" in entry["what"]
    assert "self.last(self.fc(x))" in entry["line"]


def test_gradients_whose_sum_overflows(capsys):
    """Each forward stays finite; their half gradients are added before they are unscaled."""
    model = nn.Linear(1, 1)
    model, optimizer = initialized(model, "O2", loss_scale=2.0**16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    explain_overflows()
    loss = model(torch.ones(1, 1)).sum() * 0.7 + model(torch.ones(1, 1)).sum() * 0.7
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (entry, *_) = fields(capsys.readouterr().err)
    assert "Its 2 forwards and their backwards were run again and stayed finite." in entry["head"]


@pytest.mark.parametrize(("level", "scale"), [("O2", "dynamic"), ("O0", 1.0), ("O1", 128.0), ("O3", 1.0)])
def test_a_class_weight_that_is_not_finite(capsys, level, scale):
    """At a static scale the step is made with it, so the model returns NaN later: the weight is still named."""
    weight = torch.tensor([1.0, float("inf"), 1.0])
    target = torch.tensor([0, 1, 2, 0])

    def loss_of(y):
        return F.cross_entropy(y.float(), target, weight=weight)

    lose_a_step(nn.Linear(8, 3), torch.randn(4, 8), level, loss_of=loss_of, steps=3, loss_scale=scale)
    entry = fields(capsys.readouterr().err)[-1]
    what = "weight given to cross_entropy (float32 of shape (3,)) was not finite before: 1 of 3 values"
    assert entry["what"] == what
    assert entry["where"] == "outside of any module"
    assert entry["line"].endswith(": return F.cross_entropy(y.float(), target, weight=weight)")
    assert entry["hint"] == "look at what makes that tensor"


def test_a_masked_score_is_not_blamed_for_a_lost_model(capsys):
    """An infinite mask is on purpose: after a NaN of the model itself it is not what is named."""
    mask = torch.tensor([0.0, float("-inf"), 0.0])
    model = nn.Linear(8, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")

    def loss_of(y):
        return (y.float() + mask).softmax(1).pow(2).sum()

    lose_a_step(model, torch.randn(4, 8), "O1", loss_of=loss_of, steps=3, loss_scale=1.0)
    assert "mask" not in capsys.readouterr().err


# -- a learning rate that is too high ----------------------------------------------------------------------------------
def diverge(level, rate, steps=40, decay=1.0, limit=1, **options):
    """Train a small net until it overflows, or for ``steps``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = initialized(model, level, lr=rate, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    explain_overflows(limit=limit)
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, F.mse_loss(model(x).float(), y))
        scheduler.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_learning_rate_that_is_too_high(capsys, level):
    """No precision holds it; keeping a layer in float32 does not help."""
    options = {"loss_scale": 128.0} if level in ("O1", "O2") else {}
    diverge(level, 50, **options)
    entry = fields(capsys.readouterr().err)[0]
    assert entry["hint"].startswith("a lower learning rate than 50, such as 0.5, a warmup, or clipped gradients")
    assert re.match(r"\S+ grew from \S+ to \S+ in \d+ steps?, at lr=50", entry["growth"])


def test_weights_that_a_rising_rate_makes_grow_need_not_grow_as_far(capsys):
    """As a schedule whose exponent has the wrong sign: five times in ten steps, at a rate that rises by two thirds."""
    torch.manual_seed(0)
    model, optimizer = initialized(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)), "O1", lr=0.0)
    explain_overflows(limit=1)
    x = torch.full((16, 8), 30.0)
    rates = iter([0.01 * 1.05**step for step in range(100)])
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    for _ in range(40):
        optimizer.param_groups[0]["lr"] = next(rates)
        optimizer.zero_grad()
        loss = model(x).float().mean() * 0.0
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        model[0].weight.grad = -16.0 * model[0].weight.detach()  # grows by a sixth and more in each step
        optimizer.step()
    (entry, *_) = fields(capsys.readouterr().err)
    assert entry["growth"].startswith("0.weight grew from ")
    assert entry["hint"].startswith("the learning rate went from ")


def test_weights_of_one_optimizer_that_grow_are_one_fault(capsys):
    diverge("O1", 5.0, steps=60, limit=3)
    grown = [entry["growth"] for entry in fields(capsys.readouterr().err) if "growth" in entry]
    assert len(grown) == 1


def test_clipping_is_no_cure_for_an_optimizer_that_divides_by_the_size_of_gradients(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = amp.initialize(
        model, torch.optim.Adam(model.parameters(), lr=300.0), opt_level="O1", verbosity=0, loss_scale=128.0
    )
    explain_overflows(limit=1)
    x = torch.randn(16, 8)
    for _ in range(10):
        optimizer.zero_grad()
        make_step(optimizer, model(x).float().pow(2).mean())
    entry = fields(capsys.readouterr().err)[0]
    assert (
        entry["hint"]
        == "a lower learning rate than 300, such as 3, or a warmup: no precision holds weights that grow so"
    )


def test_a_learning_rate_that_jumps_is_the_schedulers(capsys):
    """It divides by what is left of the steps."""
    torch.manual_seed(0)
    model, optimizer = initialized(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), "O1", lr=0.01)
    explain_overflows(limit=1)
    x = torch.randn(16, 8)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 0.01 / max(5 - step, 1e-9)
        optimizer.zero_grad()
        make_step(optimizer, model(x).float().pow(2).mean())
    entry = fields(capsys.readouterr().err)[0]
    assert (
        entry["hint"] == "the learning rate went from 0.002 to 1e+07 in these steps: look at its scheduler, or cap it"
    )


def test_the_highest_learning_rate_of_these_steps_is_named(capsys):
    diverge("O0", 40, decay=0.9)
    entry = fields(capsys.readouterr().err)[0]
    assert ", at lr=40, and the loss from " in entry["growth"]


def test_the_growth_of_weights_as_json(capsys):
    explain_as("json")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O3", lr=50.0)
    x = torch.full((2, 4), 100.0)
    for _ in range(2):
        optimizer.zero_grad()
        make_step(optimizer, model(x).pow(2).mean() * 1e-2)
    fault = json.loads(capsys.readouterr().err.splitlines()[0])
    growth = fault["growth"]
    assert growth["parameter"] == "weight"
    assert (growth["steps"], growth["rates"]) == (1, [50.0])
    assert growth["after"] > 10 * growth["before"] > 0


def test_weights_that_stay_what_they_are_are_not_blamed(capsys):
    torch.manual_seed(0)
    lose_a_step(T5Like(), torch.ones(4, 16), "O1", steps=3)
    assert not any("growth" in entry or "learning rate" in entry["hint"] for entry in fields(capsys.readouterr().err))


@pytest.mark.parametrize(
    ("then", "hint"),
    [
        (
            lambda y: y.masked_fill(y < 1e3, float("-inf")).softmax(-1),
            "write -1e4 in place of -inf",
        ),
        (lambda y: y / (y.abs().amax(-1, keepdim=True) + 1e-8), "eps=1e-08 is 0 in float16"),
    ],
    ids=["-inf in a mask", "an eps"],
)
def test_float32_is_no_cure_for_inputs_that_it_does_not_hold_either(capsys, then, hint):
    """Cast to float32, the op gets the same numbers."""
    lose_a_step(zeroed(then), BATCH, "O2")
    entry = fields(capsys.readouterr().err)[0]
    assert entry.get("largest", entry.get("value")).endswith("in float32 too with these inputs")
    assert hint in entry["hint"]
    assert not any(".float()" in told for told in entry["all"])


def test_weights_that_were_loaded_did_not_grow(capsys):
    """Larger ones than before, and no step's doing."""
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O1", lr=1e-3)
    explain_overflows()
    for size in (1.0, 1e5):
        optimizer.zero_grad()
        model.load_state_dict({"weight": torch.full((4, 4), size), "bias": torch.zeros(4)})
        make_step(optimizer, model(torch.ones(2, 4)).float().pow(2).mean() * 0.1)
    (entry,) = fields(capsys.readouterr().err)
    assert "growth" not in entry


# -- cures that work as they are written -------------------------------------------------------------------------------
class Squares(nn.Module):
    """Squares in half, whose share of their sum goes into a layer with half weights."""

    def __init__(self, before=lambda y: y, after=lambda y: y):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.before, self.after = before, after

    def forward(self, x):
        squares = self.before(self.fc1(x) * 1000).pow(2)
        return self.fc2(self.after(squares / squares.sum()))


def test_float32_and_back_is_proposed_where_a_layer_takes_half_alone(capsys):
    torch.manual_seed(0)
    lose_a_step(Squares(), BATCH, "O2")
    (entry,) = fields(capsys.readouterr().err)
    assert entry["hint"] == (
        "compute it in float32: .float() on what goes into pow, and .half() on what comes of it, once that is small"
        " again, before a layer takes it"
    )
    with pytest.raises(RuntimeError, match="dtype"):
        lose_a_step(Squares(before=lambda y: y.float()), BATCH, "O2")
    _, optimizer = lose_a_step(Squares(before=lambda y: y.float(), after=lambda y: y.half()), BATCH, "O2")
    assert not amp.step_was_skipped(optimizer)
    assert "ampcompat explain" not in capsys.readouterr().err


def test_a_buffer_that_the_model_was_made_with(capsys):
    """Its frequencies are divided by a width of 0."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Module())
    model[1].register_buffer("frequency", torch.arange(8.0) / 0.0)
    model[1].forward = lambda x: x * model[1].frequency
    explain_overflows()
    model, optimizer = initialized(model, "O1")
    make_step(optimizer, model(BATCH).float().mean())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"].startswith("buffer 1.frequency was not finite before the forward")
    assert entry["hint"].startswith("it was not finite before amp.initialize already: look at how the model is made")


def test_other_lines_where_the_same_happens_are_named(capsys):
    def loss_of(y):
        y = y.float() * 0
        first = torch.log(y).mean() + torch.log(-y).mean()
        return first + torch.log(y.abs()).mean()

    lose_a_step(nn.Linear(8, 8), BATCH, loss_of=loss_of, steps=3)
    entry = fields(capsys.readouterr().err)[-1]
    line = int(re.search(r"\.py:(\d+): ", entry["line"]).group(1))
    assert re.fullmatch(rf"the same 1 time more in this line, and in \S+\.py:{line + 1}", entry["also"])


def test_two_inputs_that_are_not_finite_are_no_lines(capsys):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.fc(x) + self.fc(y)

    model, optimizer = initialized(Sum(), "O1")
    explain_overflows()
    make_step(optimizer, model(BATCH / 0, BATCH / 0).float().mean())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"].startswith("input 0 was not finite before the forward")
    assert "also" not in entry


def test_a_weight_that_was_spoiled_between_initialize_and_the_first_step(capsys):
    torch.manual_seed(0)
    explain_overflows()
    model, optimizer = initialized(nn.Linear(8, 8), "O1")
    with torch.no_grad():
        model.weight[2] = float("nan")
    make_step(optimizer, model(BATCH).float().mean())
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"].endswith(": 8 of 64 values, in row 2")
    assert entry["hint"].startswith("it was finite at amp.initialize, and no step was made yet")


# -- what is not known -------------------------------------------------------------------------------------------------
def lose_to_a_weight_that_moves(moves_at):
    """Overflow in the backward of a weight of 100, which is written before the step where ``moves_at`` says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = initialized(model, "O2", lr=1e-9, min_loss_scale=2.0**14)
    explain_overflows()
    for step in range(1, 21):
        with torch.no_grad():
            model[1].weight.fill_(100.0)
        with amp.scale_loss(model(torch.ones(2, 4)).float().mean() * 0.2, optimizer) as scaled:
            scaled.backward()
        if step in moves_at:
            with torch.no_grad():
                model[1].weight.zero_()  # as the step of another optimizer, or a clip of weights, may
        optimizer.step()
        optimizer.zero_grad()


def test_a_batch_whose_weights_moved_is_not_run_again_but_watched(capsys):
    lose_to_a_weight_that_moves(range(1, 21))
    (entry,) = fields(capsys.readouterr().err)
    assert entry["what"] == "linear (aten::mm) left the range of float16: 8 of 8 values"
    assert "20 of 20 steps were skipped; the cause is" in last_words()[-1].head


def test_what_was_held_back_is_told_once_it_is_known_to_be_a_fault(capsys):
    """The overflow that shows that it is one cannot be looked into itself."""
    lose_to_a_weight_that_moves([20])
    (entry,) = fields(capsys.readouterr().err)
    assert entry["pass"] == "backward"
    assert entry["what"] == "linear (aten::mm) left the range of float16: 8 of 8 values"
    assert "20 of 20 steps were skipped; the cause is" in last_words()[-1].head


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "op"),
    [
        (None, "_flash_attention_backward"),  # a kernel that takes half alone
        (3.4e38, "mm"),
    ],
)
def test_bfloat16_is_not_advised_where_it_is_used(half, value, op):
    name = str(half).removeprefix("torch.")
    event = Event(op, NOWHERE, backward=True, dtype=half, value=value, not_finite=1, elements=4)
    setting = Setting(
        half=name,
        casts_functions=True,
        scale=1.0,
        dynamic=False,
        origin="",
        growth=None,
        kept=[],
    )
    assert (BFLOAT16 in hints(event, setting)) == (half is torch.float16)
