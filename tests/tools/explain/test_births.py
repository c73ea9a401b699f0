"""Births whose place is known: the line, the module and the pass that explain names, and what it says of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from amp_training import initialized, make_step
from explain_kit import explain, told
from torch import nn

from ampcompat import amp


def lose_a_step(model, x, level="O1", loss_of=lambda y: y.float().pow(2).mean(), steps=1, **options):
    """Train ``model`` on ``x`` under explain."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain()
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, loss_of(model(x)))
    return model, optimizer


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
#: What is trained, with which options, and what is told: ``line`` is a part of the source line.
CULPRITS = {
    "-1e9 in a mask": (
        lambda: Attention(fill=-1e9),
        {"x": WORDS},
        {"op": "mul", "line": "(1 - keep) * self.fill", "became": "NaN", "float32": 1e9},
    ),
    "exploding logits": (
        lambda: Attention(sharp=400.0),
        {"x": WORDS},
        {"function": "bmm", "line": "torch.bmm(q * self.sharp", "module": "", "model": "Attention"},
    ),
    **{
        f"log of zero at {level}": (
            lambda: Head(lambda y: torch.log(F.relu(y))),
            {"level": level},
            {"op": "log", "line": "torch.log(F.relu(y))", "pass": "forward"},
        )
        for level in ("O0", "O1", "O3")
    },
    "division by a zero norm": (
        lambda: zeroed(lambda y: y / y.norm(dim=-1, keepdim=True)),
        {},
        {"op": "div", "line": "y.norm(dim=-1", "see": ["div"]},
    ),
    "a gradient beyond float16": (
        lambda: Head(lambda y: y),
        {"level": "O2", "loss_of": lambda y: (y * 50).sum()},
        {"pass": "backward", "see": ["gradient"]},
    ),
    "the root of zero at O0": (
        lambda: zeroed(lambda y: y.sum(-1).sqrt()),
        {"level": "O0", "loss_of": lambda y: y.mean()},
        {"line": "sqrt", "pass": "backward", "see": ["sqrt, norm"]},
    ),
    "a buffer": (with_infinite_buffer, {}, {"kind": "buffer", "op": "buffer centre of Head"}),
    "a mask that softmax turns into zeros": (Masked, {"x": WORDS}, {"line": "3e38 * 10"}),
    # A training batch norm reads no statistics: the op that overflows is at fault.
    "statistics that an earlier batch spoiled": (
        lambda: Normed(1e4, running_var=float("inf")),
        {"x": LARGE, "level": "O2"},
        {"module": "fc", "model": "Normed"},
    ),
    "statistics that an evaluating model reads": (
        lambda: Normed(running_mean=float("nan")).eval(),
        {},
        {"op": "buffer bn.running_mean of Normed"},
    ),
    "statistics that an evaluating norm reads": (
        never_in_training,
        {},
        {"op": "buffer bn.running_mean of Normed"},
    ),
    "a backward of torch's modules": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        {"x": torch.ones(4, 8), "level": "O2", "loss_of": lambda y: y.sum() * 6.0},
        {"pass": "backward", "module": "0", "model": "Sequential", "line": "loss_of(model(x))"},
    ),
    "a constant of a module": (
        lambda: Scaled(8, 8),
        {},
        {"kind": "tensor", "line": "return super().forward(x) * self.scale"},
    ),
    "statistics that the batch itself spoils": (
        lambda: Normed(1e4),
        {"x": LARGE, "level": "O2"},
        {"function": "linear", "module": "fc", "line": "self.bn(self.fc(x))"},
    ),
    **{
        f"torch's modules at {level}": (
            lambda level=level: of_torchs_modules(1e38 if level == "O0" else 6e4),
            {"x": torch.full((4, 8), 100.0), "level": level},
            {"module": "1.0", "model": "Sequential", "line": "loss_of(model(x))"},
        )
        for level in ("O0", "O2")
    },
    **{
        f"the backward of a function, {followed}": (
            lambda after=after: UsesFunction(after),
            {},
            {
                "pass": "backward",
                "function": "LogOfZero",
                "op": "div",
                "module": "act",
                "line": "return grad / divisor",
            },
        )
        for followed, after in (("last", lambda y: y), ("followed", lambda y: y * 0.5))
    },
    **{
        f"a function as the model at {level}": (
            lambda: Whole(8, 8),
            {"level": level},
            {"module": "", "model": "Whole", "line": 'return grad * float("inf")'},
        )
        for level in ("O0", "O2")
    },
}


@pytest.mark.parametrize("name", CULPRITS)
def test_the_culprit(capsys, name):
    make, options, facts = CULPRITS[name]
    lose_a_step(make(), **{"x": BATCH, "steps": 5, **options})
    (fault,) = told(capsys).faults
    assert facts.pop("line", "") in (fault["source"] or "")
    assert {label: fault[label] for label in facts} == facts


def test_what_went_in_and_what_came_out(capsys):
    x = torch.ones(4, 8)
    x[2, 0] = 0.0
    model, optimizer = initialized(nn.Linear(8, 8), "O0", loss_scale="dynamic")
    explain()
    for _ in range(2):
        make_step(optimizer, (model(x) * torch.log(x.half())).mean())
    fault = told(capsys).first
    (given,) = fault["inputs"]
    assert (given["dtype"], given["shape"], given["zeros"]) == ("float16", [4, 8], 1)
    assert (given["least"], given["most"], given["not_finite"]) == (0.0, 1.0, 0)
    out = fault["out"]
    assert (out["dtype"], out["not_finite"], out["elements"], out["rows"]) == ("float16", 1, 32, [2])
    assert fault["float32"] == "inf"  # a string: JSON has none


def test_what_float32_gives(capsys):
    lose_a_step(Head(lambda y: (y.half() * 200).pow(2).float()), torch.full((4, 8), 200.0), "O2")
    fault = told(capsys).first
    assert 65504 < fault["float32"] < math.inf


def test_a_gradient_is_told_without_the_loss_scale(capsys):
    lose_a_step(nn.Linear(8, 8), torch.full((4, 8), 100.0), "O2", lambda y: y.sum() * 4, loss_scale=4096.0)
    fault = told(capsys).first
    assert fault["float32"] / fault["scale"] == pytest.approx(1600, rel=0.01)


def test_a_gradient_of_the_scripts_own_grad_has_no_loss_scale_in_it(capsys):
    """As in a gradient penalty: it is what it is at any loss scale."""
    model, optimizer = initialized(nn.Linear(8, 8), "O2")
    explain()
    for _ in range(8):
        optimizer.zero_grad()
        x = torch.full((4, 8), 1e-3, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).float().sum() * 1e6, x, create_graph=True)
        make_step(optimizer, grad.float().pow(2).mean())
    fault = told(capsys).first
    assert (fault["pass"], fault["see"]) == ("backward", ["too large"])


# -- zeros -------------------------------------------------------------------------------------------------------------
ZEROS = {
    "a softmax": lambda y: torch.log(torch.softmax(y * 0 + torch.arange(8) * 4, -1)),
    "a square": lambda y: y / (y * 1e-4 / y.detach()).pow(2).sum(-1, keepdim=True),
    "an eps": lambda y: y / (y.abs() * 0 + 1e-8),
}


@pytest.mark.parametrize("name", ZEROS)
def test_a_zero_that_half_made_has_its_op(capsys, name):
    lose_a_step(Head(ZEROS[name]), BATCH, "O2")
    assert "where float32 gives up to" in told(capsys).first["zeros"]


@pytest.mark.parametrize("last", [lambda y: torch.log(y * 0), lambda y: torch.log(F.relu(y) * (y > 9))])
def test_a_zero_that_float32_makes_too_has_none(capsys, last):
    lose_a_step(Head(last), BATCH, "O2")
    assert told(capsys).first["zeros"] is None


def test_what_a_dropout_has_set_to_0_is_no_underflow(capsys):
    """Drawn again, other values are 0."""
    lose_a_step(Head(lambda y: torch.log(F.dropout(y.abs(), 0.5))), BATCH, "O2")
    fault = told(capsys).first
    assert (fault["op"], fault["zeros"]) == ("log", None)


# -- masks -------------------------------------------------------------------------------------------------------------
def masked(y):
    return y.masked_fill(torch.arange(y.shape[-1]) == 3, -torch.inf)


@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom is <= 0:UserWarning")
def test_a_mask_that_the_model_returns_is_not_why_the_loss_is_nan(capsys):
    """Illegal actions have -inf; the standard deviation of one advantage is NaN."""

    def loss(y):
        return -(F.log_softmax(y.float(), -1)[:, 0] / torch.ones(1).std()).mean()

    lose_a_step(Head(masked), BATCH, loss_of=loss, steps=3)
    assert {fault["op"] for fault in told(capsys).faults} == {"std"}


def test_a_mask_is_not_why_what_stands_beside_it_becomes_too_large(capsys):
    lose_a_step(Head(lambda y: F.softmax(masked(y.half() * 100) / 1e-4, -1).float()), BATCH)
    fault = told(capsys).first
    assert (fault["op"], fault["see"]) == ("div", ["too large"])


def test_a_mask_is_why_the_loss_of_a_forbidden_action_is_infinite(capsys):
    lose_a_step(Head(masked), BATCH, loss_of=lambda y: F.cross_entropy(y.float(), torch.full((4,), 3)))
    fault = told(capsys).first
    assert (fault["op"], fault["see"]) == ("masked_fill", ["written"])


def test_an_inf_that_where_takes_away_is_no_fault(capsys):
    def last(y):
        square = (y.half() * 1e4).pow(2)
        return torch.where(square > 100, torch.zeros_like(square), square).float() + torch.log(y * 0 + 1)

    lose_a_step(Head(last), BATCH, steps=3)
    assert told(capsys).faults == []


# -- growth ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_weights_that_grow_are_told_as_numbers(capsys, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    options = {"loss_scale": 128.0} if level == "O2" else {}
    model, optimizer = initialized(model, level, lr=50, **options)
    explain(limit=1)
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    for _ in range(20):
        optimizer.zero_grad()
        make_step(optimizer, F.mse_loss(model(x).float(), y))
    fault = told(capsys).first
    growth = fault["growth"]
    assert growth["after"] > 4 * growth["before"] > 0
    assert set(growth["rates"]) == {50.0}
    assert growth["losses"][-1] > growth["losses"][0]
    assert fault["see"][0] == "growth"
    assert "too large" not in fault["see"]  # whose row has keep_fp32


def test_weights_that_no_op_had_read_are_not_told(capsys):
    """The bias learns the mean of the targets, behind the line that overflows."""

    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(F.layer_norm(self.first(x).square(), (8,)))

    model = Behind()
    model.requires_grad_(False).second.bias.requires_grad_(True)
    model, optimizer = initialized(model, "O2", lr=0.05, loss_scale=1.0)
    explain()
    for step in range(12):
        optimizer.zero_grad()
        x = BATCH * (3000 if step == 11 else 1)
        make_step(optimizer, (model(x).float() - 100).pow(2).mean())
    fault = told(capsys).first
    assert (fault["step"], fault["growth"]) == (12, None)


def test_weights_that_were_loaded_did_not_grow(capsys):
    model, optimizer = initialized(nn.Linear(4, 4), "O1", lr=1e-3)
    explain()
    for size in (1.0, 1e5):
        optimizer.zero_grad()
        model.load_state_dict({"weight": torch.full((4, 4), size), "bias": torch.zeros(4)})
        make_step(optimizer, model(torch.ones(2, 4)).float().pow(2).mean() * 0.1)
    assert [fault["growth"] for fault in told(capsys).faults] == [None]


# -- what is not known -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moves_at", [range(1, 21), [20]])
def test_gradients_whose_weights_moved_are_watched(capsys, moves_at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = initialized(model, "O2", lr=1e-9, min_loss_scale=2.0**14)
    explain()
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
    seen = told(capsys)
    assert [(fault["function"], fault["pass"]) for fault in seen.faults] == [("linear", "backward")]
    assert seen.counts["skipped"] == 20


@pytest.mark.parametrize(("level", "scale"), [("O2", "dynamic"), ("O0", 1.0), ("O1", 128.0), ("O3", 1.0)])
def test_a_class_weight_that_is_not_finite(capsys, level, scale):
    """At a static scale the step is made with it, so the model returns NaN later: the weight is still named."""
    weight = torch.tensor([1.0, float("inf"), 1.0])
    target = torch.tensor([0, 1, 2, 0])

    def loss_of(y):
        return F.cross_entropy(y.float(), target, weight=weight)

    lose_a_step(nn.Linear(8, 3), BATCH, level, loss_of=loss_of, steps=3, loss_scale=scale)
    fault = told(capsys).last
    assert (fault["kind"], fault["out"]["name"], fault["out"]["not_finite"]) == ("tensor", "weight", 1)
    assert "weight=weight" in fault["source"]


def test_a_masked_score_is_not_blamed_for_a_lost_model(capsys):
    mask = torch.tensor([0.0, float("-inf"), 0.0])
    model = nn.Linear(8, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")

    def loss_of(y):
        return (y.float() + mask).softmax(1).pow(2).sum()

    lose_a_step(model, BATCH, "O1", loss_of=loss_of, steps=3, loss_scale=1.0)
    assert {fault["kind"] for fault in told(capsys).faults} == {"parameter"}
