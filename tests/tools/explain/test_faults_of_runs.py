"""Runs of forty steps, each with one fault: explain names it, where it is and the cheapest cure, and sums up.

A step that an ordinary back-off of the loss scale skips is no fault. What cannot be known is said to be unknown.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from amp_training import last_words
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows

STEPS = 40
RAMP = torch.linspace(-1, 1, 32).view(4, 8)
INFINITE = torch.full((8,), float("inf"))
WIDE = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 5


class Layer(nn.Module):
    """A linear layer, and what ``then`` does with its result."""

    def __init__(self, then=lambda y: y, weight=None):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.then = then
        if weight is not None:
            nn.init.constant_(self.fc.weight, weight)
            nn.init.constant_(self.fc.bias, weight)

    def forward(self, x):
        return self.then(self.fc(x))


class Residual(nn.Module):
    """As in T5: the second layer gives results beyond float16, and a norm hides how large they are."""

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(8, 8)
        self.wo = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        nn.init.constant_(self.wi.weight, 1.0)
        nn.init.constant_(self.wo.weight, 3e4)

    def forward(self, x):
        return self.norm(x + self.wo(F.relu(self.wi(x))))


class Scores(nn.Module):
    """Attention whose scores are masked, or multiplied, by a constant."""

    def __init__(self, fill=0.0, sharp=1.0):
        super().__init__()
        self.qk = nn.Linear(8, 8)
        self.fill, self.sharp = fill, sharp

    def forward(self, x):
        scores = self.qk(x) * self.sharp
        mask = torch.zeros_like(scores)
        mask[:, 4:] = 1
        mask[0] = 1  # nothing is left of this row
        return torch.softmax(scores + mask * self.fill, -1)


def least_costs(y):
    """As soft-DTW's table: what no path has reached costs inf."""
    table = y.new_full((len(y), 3), float("inf"))
    table[:, 0] = y.abs().sum(1)
    for column in (1, 2):
        paths = -torch.stack([table[:, column - 1], table[:, column]]) / 0.01  # here
        most = paths.max(0).values
        table[:, column] = y[:, 0] - 0.01 * ((paths - most).exp().sum(0).log() + most)
    return table[:, 2]


def squared_means(y):
    """As an SSIM's."""
    means = F.conv1d(y[:, None].float(), torch.full((1, 1, 3), 1 / 3))
    return means * means * torch.full_like(means, 4.0)


class Cooling(Layer):
    """As a Gumbel softmax whose temperature has no floor."""

    temperature = 1.0

    def forward(self, x):
        self.temperature *= 0.7
        return torch.softmax(super().forward(x) / self.temperature, -1)


class LargeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().pow(2).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 1e6


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (x - x)


class LargePowers(torch.autograd.Function):
    """As Mish in its first versions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        powers = torch.exp(x)
        squares = powers * powers
        return grad * squares / (1 + squares)


class RMSNorm(nn.Module):
    def forward(self, x):
        squares = x.pow(2).mean(-1, keepdim=True)
        return x * (squares / (squares + 1))


class NormalizedLayer(Layer):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()

    def forward(self, x):
        return self.norm(self.fc(x))


class Residuals(nn.Module):
    """Two of them, in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Weighted(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([1e5, 1.0]))

    def forward(self, x):
        weight = self.table[0]
        return super().forward(x) * (weight / (weight + 1))


class Summing(Layer):
    """Running statistics, as reinforcement learning has them: those of the squares leave float16."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.total += (x * 100).pow(2).sum(0)
        return super().forward(x / (self.total + 1).sqrt())


class Normalizing(Layer):
    """As RevIN does."""

    def forward(self, x):
        deviation = torch.sqrt(torch.var(x, dim=0) + 1e-5)
        return super().forward((x - x.mean(0)) / deviation) * deviation


class LogFirst(Layer):
    """As a flow that begins with logits: in half 1 - 1e-5 is 1."""

    def forward(self, x):
        return super().forward(torch.log(x) - torch.log(1 - x))


class SumOfSquares(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.total += (x * 100).pow(2).sum(0)
        self.total -= self.total * 1e-3
        return x / (self.total + 1).sqrt()


class NormalizedBySum(Layer):
    def __init__(self):
        super().__init__()
        self.norm = SumOfSquares()

    def forward(self, x):
        return super().forward(self.norm(x))


def square(y):
    return y.float().pow(2).mean()


def shares(distance):
    nearness = 1 / (1 + distance)
    return nearness / nearness.sum(1, keepdim=True)


def mean_of_what_is_large(y):
    mask = (y.detach() > 0.2).float()
    return (y.float().pow(2) * mask).sum() / mask.sum()


def cross_entropy_of_what_is_large(y):
    target = torch.where(y.detach()[:, 0] > 0.2, 1, -100)  # -100 is left out
    return F.cross_entropy(y.float(), target)


def with_a_lost_row():
    model = Layer()
    with torch.no_grad():
        model.fc.weight[5] = float("nan")
    return model


def as_replica():
    model = Layer()
    model._is_replica = True  # of DataParallel
    return model


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def sgd(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def once(value, at=31, usual=RAMP):
    """The batch numbered ``at`` has one such value."""

    def batch(step):
        x = usual.clone()
        if step == at:
            x[2, 3] = value
        return x

    return batch


class TwoHeads(nn.Module):
    """The second overflows at step 36, of which the first has no part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.step = 0

    def forward(self, x):
        self.step += 1
        grown = self.first(x)
        return grown + torch.sigmoid(self.second(x)) * (1e6 if self.step > 35 else 1.0)


def sgd_of_first_head(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 2.4}, {"params": others, "lr": 1e-5}])


class ShrinkingAt20(torch.optim.SGD):
    """Its step 20 makes weights small again, as where a script loads others."""

    def __init__(self, params):
        super().__init__(params, lr=80.0)
        self.steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 20:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.mul_(1e-2)


@dataclass
class Fault:
    """A run and what is told of it.

    Attributes:
        told: Parts of the first explanation, by label; "head" is its first line. Empty: nothing is explained.
        verdict: A pattern of the last line.
        count: How many explanations there are.
    """

    told: dict[str, str]
    verdict: str
    model: Callable[[], nn.Module] = Layer
    level: str = "O1"
    batch: Callable[[int], torch.Tensor] = lambda step: RAMP
    loss: Callable[[torch.Tensor], torch.Tensor] = square
    optimizer: Callable = sgd(1e-3)
    between: Callable = lambda optimizer, step: None
    steps: int = STEPS
    count: int = 1
    options: dict = field(default_factory=dict)


FAULTS = {
    # -- no fault ------------------------------------------------------------------------------------------------------
    "an ordinary descent": Fault(
        {},
        r"^\d+ of 40 steps were skipped while the loss scale came down to \d+: that is normal\.$",
        level="O2",
        loss=lambda y: (y.float() * 300).sum(),
        count=0,
    ),
    "no overflow at all": Fault({}, r"^none of 40 steps was skipped\.$", count=0),
    "a back-off in mid-run": Fault(
        {},
        r"^1 of 40 steps was skipped while the loss scale came down to 32768: that is normal\.$",
        level="O2",
        loss=lambda y: y.float().mean() * 0.1,
        batch=lambda step: RAMP.abs() * (200 if step == 25 else 1),
        count=0,
    ),
    # -- data ----------------------------------------------------------------------------------------------------------
    "a NaN in a batch, after a descent": Fault(
        {
            "head": "The loss of step 31 is nan.",
            "what": "input 0 was not finite before the forward: 1 of 32 values, in row 2",
            "hint": "look at what makes it (the data loader",
        },
        r"^12 of 40 steps were skipped; the cause of 1 of these is input 0 of Layer, which was not finite;"
        r" 11 were lost while the loss scale came down to 32, which is normal\.$",
        level="O2",
        batch=once(float("nan")),
        loss=lambda y: (y.float() * 300).sum(),
    ),
    "a NaN in a batch, while weights grow": Fault(
        {"line": "x[2, 3] = value", "hint": "this line writes a number that is not finite"},
        r"^2 of 4 steps were skipped; the cause of 1 of these is .*\(__setitem__\); 1 was lost while",
        batch=once(float("nan"), at=4),
        optimizer=sgd(20.0),
        steps=4,
    ),
    "an outlier in a batch": Fault(
        {
            "head": "The loss of step 31 is inf.",
            "what": "is too large for float16, to which linear casts it: 1 of 32 values",
            "largest": "1e+06",
            "hint": "look at the data: row 2 of input 0, up to 1e+06, the usual one 1",
        },
        r"; the cause of 1 of these is .*\(linear in fc\)\.$|^1 of 40 steps was skipped; the cause is .*linear in fc",
        batch=once(1e6),
    ),
    "an outlier that amp casts itself": Fault(
        {
            "what": "a value is too large for float16: 1 of 32 values",
            "hint": "look at the data: row 2 of input 0, up to 1e+06, the usual one 1",
        },
        r"^1 of 40 steps was skipped; the cause is .*\(a cast to float16\)\.$",
        level="O2",
        batch=once(1e6),
        loss=lambda y: y.float().mean() * 0.1,
    ),
    # -- values of the forward -----------------------------------------------------------------------------------------
    "a layer beyond float16": Fault(
        {
            "what": "linear (aten::addmm) left the range of float16: 32 of 32 values",
            "where": "wo (Linear), in Residual",
            "hint": "amp.initialize(..., keep_fp32=['wo'])",
        },
        r"^40 of 40 steps were skipped; the cause is \S*test_faults_of_runs.py:\d+ \(linear in wo\)\.$",
        model=Residual,
        batch=lambda step: torch.ones(4, 8),
    ),
    "-1e9 in a mask": Fault(
        {"line": "mask * self.fill", "hint": "write -1e4 in place of it"},
        r"^40 of 40 steps were skipped; the cause is \S*test_faults_of_runs.py:\d+ \(mul\)\.$",
        model=lambda: Scores(fill=-1e9),
        level="O2",
    ),
    "a constant that is too large, for the gradient too": Fault(
        {
            "what": "aten::mul left the range of float16",
            "hint": "a smaller constant than 1e+06",
            "or": "compute it in float32: .float() on what goes into mul, and .half()",
        },
        r"the cause is .*\(mul\)\.$",
        model=lambda: Scores(sharp=1e6),
        level="O2",
    ),
    "a temperature that falls without end": Fault(
        {"what": "aten::div left the range of float16", "hint": "a larger divisor than 1.10443e-05"},
        r"the cause of \d+ of these is .*\(div\);",
        model=lambda: Cooling(),
        level="O1",
    ),
    "a constant that the gradient bears": Fault(
        {"what": "aten::mul left the range of float16", "hint": "compute the loss in float32: .float() on what the"},
        r"the cause .*is .*\(mul\)[.;]",
        model=lambda: Layer(lambda y: torch.softmax(y * 300, -1), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 30.0),
    ),
    "a constant, in place": Fault(
        {"what": "aten::mul_ left the range of float16", "hint": "a smaller constant than 1e+06"},
        r"the cause is .*\(mul_\)\.$",
        model=lambda: Layer(lambda y: y.mul_(1e6)),
        level="O2",
    ),
    "squares in half, in a module of the model": Fault(
        {
            "what": "aten::pow left the range of float16",
            "hint": "AMPCOMPAT_DTYPE=bfloat16",  # the LayerNorm is given it in half
        },
        r"the cause is .*\(pow in 0\)\.$",
        model=lambda: nn.Sequential(Layer(lambda y: (y * 1000).pow(2)), nn.LayerNorm(8)),
        level="O2",
    ),
    "squares in half": Fault(
        {
            "what": "aten::pow left the range of float16",
            "hint": "the loss in float32: .float() on what the layers returned, before it goes into pow",
        },
        r"the cause is .*\(pow\)\.$",
        model=lambda: Layer(lambda y: (y * 1000).pow(2).sum(-1)),
        level="O2",
    ),
    "exp beyond float32": Fault(
        {"what": "aten::exp gave a result that is not finite, in float32", "hint": "exp of more than 88"},
        r"the cause is .*\(exp\)\.$",
        model=lambda: Layer(lambda y: torch.exp(y * 500)),
    ),
    "an eps that is 0 in float16": Fault(
        {"what": "aten::div", "hint": "eps=1e-08 is 0 in float16"},
        r"the cause is .*\(div\)\.$",
        model=lambda: Layer(lambda y: y / (y.abs().amax(-1, keepdim=True) + 1e-8), weight=0.0),
        level="O2",
    ),
    "the logarithm of a softmax": Fault(
        {"what": "log", "hint": "F.log_softmax(x, dim) in place of log(softmax(x))"},
        r"^40 of 40 steps were skipped; the cause is .*\(log\)\.$",
        model=lambda: Layer(lambda y: torch.log(torch.softmax(y * 60, -1))),
        level="O2",
        batch=lambda step: WIDE,
    ),
    "an infinity of the model with finite gradients": Fault(
        {
            "head": "The loss of step 1 is inf.",
            "what": "masked_fill",
            "line": 'float("inf")',
        },
        r"^\d+ of 40 steps had a loss, a gradient or a weight that is not finite; the cause is .*\(masked_fill\)\.$",
        model=lambda: Layer(lambda y: y.float().masked_fill(y > 0.4, float("inf"))),  # the first step moves weights
        optimizer=sgd(0.5),
    ),
    # -- the loss ------------------------------------------------------------------------------------------------------
    "the logarithm of 0 in the loss": Fault(
        {"head": "The loss of step 1 is inf.", "next what": "aten::log", "next hint": "F.log_softmax(x, dim)"},
        r"^40 of 40 steps were skipped; the cause is .*\(log\)\.$",
        model=lambda: Layer(lambda y: torch.softmax(y * 60, -1)),
        level="O2",
        batch=lambda step: WIDE,
        loss=lambda p: -torch.log(p).mean(),
        count=2,
    ),
    "a class weight": Fault(
        {
            "head": "The loss of step 1 is nan.",
            "next what": "weight given to cross_entropy",
            "next hint": "look at what makes",
        },
        r"^40 of 40 steps were skipped; the cause is .*cross_entropy.*\.$",
        loss=lambda y: F.cross_entropy(y.float(), torch.tensor([0, 1, 2, 3]), INFINITE),
        count=2,
    ),
    "a mask that leaves nothing, once": Fault(
        {
            "head": "The loss of step 31 is nan. Its forward was run again and stayed finite, with results up to 0.09",
        },
        r"^1 of 40 steps was skipped; the cause was not found\.$",
        model=lambda: Layer(lambda y: y, weight=0.1),
        batch=lambda step: torch.full((4, 8), 0.0 if step == 31 else 0.5),
        loss=mean_of_what_is_large,
    ),
    "a loss of nothing, with gradients of 0": Fault(
        {
            "head": "The loss of step 31 is nan.",
            "next head": "The loss of step 32 is nan.",
            "next line": "F.cross_entropy(y.float(), target)",
        },
        r"^10 of 40 steps had a loss, a gradient or a weight that is not finite; the cause is .*cross_entropy.*\.$",
        batch=lambda step: torch.full((4, 8), 0.0 if step > 30 else 0.5),
        model=lambda: Layer(weight=0.1),
        loss=cross_entropy_of_what_is_large,
        count=2,
    ),
    "what cannot be run again": Fault(
        {
            "head": "The loss of step 1 is nan. Its forward could not be run again as it was. The next steps, 50 at",
            "next what": "is too large for float16, to which linear casts it",
        },
        r"^40 of 40 steps were skipped; the cause is .*\(linear in fc\)\.$",
        model=as_replica,
        batch=lambda step: torch.full((4, 8), 1e6),
        count=2,
    ),
    # -- the backward pass ---------------------------------------------------------------------------------------------
    "a loss that is too large": Fault(
        {
            "head": "Step 4 was skipped: a gradient is not finite.",
            "pass": "backward",
            "what": "a gradient is too large for float16: 32 of 32 values",
            "grown": "to 1e+07 without the loss scale, in ",
            "hint": "a smaller loss (a mean in place of a sum",
        },
        r"^26 of 40 steps were skipped; the cause is .*\(the backward of mul\)\.$",
        level="O2",
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1e-12),
        count=1,
    ),
    "a run that is too short to tell": Fault(
        {"head": "Step 4 was skipped", "what": "a gradient is too large for float16", "hint": "a smaller loss"},
        r"^8 of 8 steps were skipped; the cause is .*\(the backward of mul\)\.$",
        level="O2",
        loss=lambda y: (y.float() * 1e7).sum(),
        steps=8,
    ),
    "the root of 0": Fault(
        {
            "pass": "backward",
            "what": "4 of 4 values",
            "hint": "the gradient of sqrt at 0 is not finite: .clamp_min(1e-6)",
        },
        r"^40 of 40 steps were skipped; the cause is .*\(the backward of sqrt\)\.$",
        model=lambda: Layer(lambda y: y.float().pow(2).sum(-1).sqrt(), weight=0.0),
        loss=lambda y: y.mean(),
    ),
    "a gradient at the end of a range": Fault(
        {
            "pass": "backward",
            "hint": "the gradient of acos at the end of its domain, or outside, is not finite: .clamp(-0.999",
        },
        r"^40 of 40 steps were skipped; the cause is .*\(the backward of acos\)\.$",
        model=lambda: Layer(lambda y: torch.acos(F.normalize(y[:, :1], dim=-1).float())),
        loss=lambda y: y.mean(),
    ),
    "a function with a wrong backward": Fault(
        {"line": "return grad / (x - x)", "what": "WrongBackward (aten::div)"},
        r"^40 of 40 steps were skipped; the cause is .*\(the backward of WrongBackward\)\.$",
        model=lambda: Layer(lambda y: WrongBackward.apply(y)),
    ),
    "a static scale that is too high": Fault(
        {"head": "A gradient of step 1 is not finite.", "hint": "loss_scale='dynamic'"},
        r"^40 of 40 steps had a loss, a gradient or a weight that is not finite;"
        r" the cause is the loss scale of 16777216, which is too high for"
        r" .*\(a gradient that the code after the model made\)\.$",
        level="O2",
        options={"loss_scale": 2.0**24},
    ),
    "a static scale that is too high for the half output of a model": Fault(
        {
            "head": "A gradient of step 1 is not finite. The gradient that came into the model was not finite already:"
            " the code after the model made it. The loss scale of 1.07374e+09 may be too high for it",
        },
        r"^40 of 40 steps had a loss, a gradient or a weight that is not finite; the cause was not found: weights"
        r" are not finite since step 1 \(loss_scale=",
        options={"loss_scale": 2.0**30},
    ),
    # -- weights that grow ---------------------------------------------------------------------------------------------
    "weights that grow from next to nothing to a usual size": Fault(
        {"what": "aten::log gave a result that is not finite", "hint": "F.logsigmoid(x) in place of log(sigmoid(x))"},
        r"the cause is .*\(log\)\.$",
        model=lambda: Layer(lambda y: torch.log(torch.sigmoid(y * 60)), weight=1e-3),
        level="O0",
        loss=lambda y: -y.mean(),
        batch=once(1e4, at=3),
        optimizer=sgd(1.0),
    ),
    "weights that grow less, but the loss with them": Fault(
        {
            "what": "linear (aten::mm) left the range of float16",
            "growth": ", at lr=0.001, and the loss from 1.6e+03 to ",
            "hint": "a lower learning rate than 0.001",
        },
        r"^3\d of 40 steps were skipped; the cause is the growth of fc\.weight, at lr=0\.001\.$",
        model=lambda: Layer(weight=0.1),
        level="O2",
        loss=lambda y: y.float().pow(2).sum() * 0.03125 * 0.25,
        batch=lambda step: torch.full((4, 8), 100.0),
        optimizer=sgd(1e-3),
        options={"max_loss_scale": 16},
    ),
    "weights that grow with a learning rate that nothing caps": Fault(
        {"growth": ", at lr=", "hint": "the learning rate went from "},
        r"the cause is the growth of fc\.\S+, at a learning rate that rises\.$",
        model=lambda: Layer(lambda y: y.pow(2).sum()),
        level="O0",
        loss=lambda y: y,
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=0.01 * 1.3**step),
    ),
    "weights that have grown, and that overflow again when they no longer do": Fault(
        {"growth": "fc.", "hint": "a lower learning rate than 80"},
        r"^2 of 40 steps were skipped; the cause is the growth of fc\.\S+, at lr=80\.$",
        loss=lambda y: 1e6 - y.float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step in (9, 35) else 1.0),
        optimizer=sgd(80.0),
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=80.0 if step < 12 else 0.0),
    ),
    "weights that grow slowly, in a run whose loss does not fall": Fault(
        {"growth": " in 34 steps, at lr=", "hint": "a lower learning rate than 2.4"},
        r"the cause is the growth of fc\.\S+, at lr=2\.4\.$",
        loss=lambda y: 1 - y.float().mean() + y.detach().float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 35 else 1.0),
        optimizer=sgd(2.4),
    ),
    "weights that grow slowly, of which the value is not made": Fault(
        {"what": "aten::mul left the range of float16", "hint": "a smaller constant than 1e+06"},
        r"the cause is .*\(mul\)\.$",
        model=lambda: TwoHeads(),
        level="O2",
        loss=lambda y: 1 - y.float().mean() + y.detach().float().mean(),
        batch=lambda step: torch.full((4, 8), 1.0),
        optimizer=sgd_of_first_head,
    ),
    "weights that grow slowly, in a run too long to have diverged": Fault(
        {"what": "linear (aten::addmm) left the range of float16", "hint": "keep_fp32=['fc']"},
        r"the cause is .*\(linear in fc\)\.$",
        loss=lambda y: 1 - y.float().mean() + y.detach().float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 520 else 1.0),
        optimizer=sgd(0.16),
        steps=520,
    ),
    "weights that grow slowly, in a run whose loss falls": Fault(
        {"what": "linear (aten::addmm) left the range of float16", "hint": "keep_fp32=['fc']"},
        r"the cause is .*\(linear in fc\)\.$",
        loss=lambda y: 100 - y.float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 35 else 1.0),
        optimizer=sgd(2.4),
    ),
    "weights that have grown, and another overflow later": Fault(
        {
            "growth": "fc.",
            "next next line": "lambda y: (y.half() * 1e6",
            "next next hint": "a smaller constant than 1e+06",
        },
        r"the cause of 3 of these is .*\(mul\); that of 1 is the growth of fc\.\S+, at lr=80",
        level="O2",
        loss=lambda y: (y.half() * 1e6 if y.detach().mean() > 1e4 else 1e6 - y).float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 9 else 20.0 if step in (35, 36, 37) else 1.0),
        optimizer=sgd(80.0),
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=80.0 if step < 12 else 0.0),
        count=3,
    ),
    "weights that have grown, and were made small again": Fault(
        {"growth": "fc.", "next what": "linear (aten::", "next hint": "keep_fp32=['fc']"},
        r"that of 1 is .*\(linear in fc\)",
        loss=lambda y: 1e6 - y.float().mean(),
        batch=lambda step: torch.full((4, 8), {9: 1e3, 35: 6e4}.get(step, 1.0)),
        optimizer=ShrinkingAt20,
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=80.0 if step < 12 else 0.0),
        count=2,
    ),
    "weights that grow far, under the log of a softmax": Fault(
        {"growth": "fc.", "hint": "F.log_softmax(x, dim) in place of log(softmax(x))"},
        r"the cause of \d+ of these is .*\(the backward of log\)",
        model=lambda: Layer(lambda y: torch.log(torch.softmax(y.float(), -1))),
        loss=lambda y: -y[:, 0].mean(),
        batch=lambda step: WIDE,
        optimizer=sgd(500.0),
    ),
    "weights that a loss made grow that was explained": Fault(
        {"what": "a gradient is too large for float16", "hint": "a smaller loss (a mean in place of a sum"},
        r"^26 of 30 .* not finite; the cause is .*\(the backward of mul\)\.$",
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1e-2),
        steps=30,
    ),
    "half weights that a loss made grow that was explained": Fault(
        {"what": "a gradient is too large for float16", "hint": "a smaller loss (a mean in place of a sum"},
        r"^26 of 40 .* not finite; the cause is .*\(the backward of mul\)\.$",
        level="O2",
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1.0),
    ),
    "weights that a backward made grow, once the scale had come down for it": Fault(
        {"growth": "fc.weight grew from"},
        r"; the cause of \d+ of these is the growth of fc.weight, at lr=0.01; 11 were lost while the loss scale came",
        model=lambda: Layer(LargeBackward.apply),
        level="O2",
        batch=lambda step: WIDE / 5,
        loss=lambda y: y.float().mean() * 1e-2,
        optimizer=sgd(1e-2),
        steps=30,
    ),
    # -- steps ---------------------------------------------------------------------------------------------------------
    "a learning rate that is too high": Fault(
        {"head": "Step", "hint": "a lower learning rate than 500", "growth": "at lr=500"},
        r"; the cause of 36 of these is the growth of fc.weight, at lr=500; 3 were lost while the loss scale came"
        r" down to \S+, which is normal\.$",
        level="O2",
        batch=lambda step: WIDE,
        optimizer=sgd(500.0),
    ),
    "Adam's eps at O3": Fault(
        {"head": "Step 1 of Adam left a weight that is not finite.", "hint": "pass eps=1e-4 to Adam"},
        r"^\d+ of 40 steps had .*; the cause is step 1 of Adam, which left fc.weight not finite\.$",
        level="O3",
        loss=lambda y: y[:, :3].float().sum(),
        optimizer=adam,
    ),
    "an eps of 0": Fault(
        {"why": "eps=0, and exp_avg_sq is 0 in 40 of these 40: a division by zero", "hint": "pass eps=1e-8 to Adam"},
        r"; the cause is step 1 of Adam, which left fc.weight not finite\.$",
        loss=lambda y: y[:, :3].float().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=0.0),
    ),
    "gradients that the script spoils": Fault(
        {
            "head": "Step 31 of SGD left a weight that is not finite.",
            "why": "its gradient was not finite",
            "hint": "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf",
        },
        r"the cause is step 31 of SGD, which left fc.weight not finite\.$",
        between=lambda optimizer, step: [
            p.grad.div_(0 if step == 31 else 1) for p in amp.master_params(optimizer) if p.grad is not None
        ],
    ),
    "weights that the script spoils between a block and its step": Fault(
        {
            "head": "The loss of step 32 is nan.",
            "what": "parameter fc.weight was not finite before the forward: 64 of 64 values",
            "hint": "no step is known to have written it",
        },
        r"; the cause is parameter fc.weight of Layer, which was not finite\.$",
        level="O2",
        between=lambda optimizer, step: [
            p.detach().fill_(float("inf")) for p in amp.master_params(optimizer) if step == 31
        ],
    ),
    "weights that the script spoils, unseen, before a step": Fault(
        {
            "head": "Step 31 of SGD left a weight that is not finite.",
            "why": "not known: its gradient is finite",
            "hint": "look at what else writes weights or gradients between scale_loss and the step",
        },
        r"; the cause is step 31 of SGD, which left fc.weight not finite\.$",
        level="O2",
        between=lambda optimizer, step: [
            p.data.fill_(float("inf")) for p in amp.master_params(optimizer) if step == 31
        ],
    ),
    "a checkpoint that is not finite": Fault(
        {
            "what": "parameter fc.weight was not finite before the forward: 64 of 64 values",
            "hint": "it was not finite before amp.initialize already",
        },
        r"^40 of 40 steps were skipped; the cause is parameter fc.weight of Layer, which was not finite\.$",
        model=lambda: Layer(weight=float("nan")),
    ),
    "an input that is half at O1": Fault(
        {
            "what": "input 0, which is float16, was not finite before the forward: 1 of 32 values",
            "hint": "do not call .half() on it",
        },
        r"the cause is input 0 of Layer, which was not finite",
        batch=lambda step: once(1e6)(step).half(),
    ),
    "the spread of one row": Fault(
        {"what": "std", "value": "NaN, in float32 too with these inputs", "hint": "std of a single value is NaN"},
        r"the cause .*is .*\(std\)",
        model=lambda: Layer(lambda y: (y.float() - y.float().mean(0)) / (y.float().std(0) + 1)),
        batch=lambda step: RAMP[: 1 if step == 31 else 4],
    ),
    "labels that are all left out": Fault(
        {"what": "nll_loss_forward", "hint": "every label of this batch is ignore_index"},
        r"the cause is .*\(cross_entropy\)",
        model=lambda: Layer(lambda y: F.cross_entropy(y.float(), torch.full((len(y),), -100))),
        loss=lambda y: y,
    ),
    "a division by next to nothing": Fault(
        {"pass": "backward", "hint": "bound the denominator in "},
        r"^\d+ of 40 steps were skipped; the cause is .*\(the backward of div\)\.$",
        level="O1",
        model=lambda: Layer(lambda y: (y * y.detach()).sum(1) / (y.float().norm(dim=1) * 0 + 1e-7)),
        loss=lambda y: y.mean(),
    ),
    "a row of a checkpoint that is not finite": Fault(
        {
            "what": "parameter fc.weight was not finite before the forward: 8 of 64 values, in row 5",
            "hint": "it was not finite before amp.initialize already",
        },
        r"^40 of 40 steps were skipped; the cause is parameter fc.weight of Layer, which was not finite\.$",
        model=with_a_lost_row,
        level="O2",
    ),
    "a weight that half does not hold": Fault(
        {
            "what": "parameter fc.weight was not finite before the forward: 64 of 64 values",
            "largest": "100000 (float16 ends at 65504)",
            "hint": "its float32 master is finite and reaches 100000: the cast to float16 lost it",
        },
        r"^40 of 40 steps were skipped; the cause is parameter fc.weight of Layer, which was not finite\.$",
        model=lambda: Layer(weight=1e5),
        level="O2",
    ),
    # -- facts, where names or numbers would be guesses ----------------------------------------------------------------
    "a division by a spread of 0, which is no count": Fault(
        {"what": "aten::div gave a result", "hint": ".clamp_min(1e-3) on the denominator"},
        r"the cause is .*\(div\)\.$",
        model=lambda: Layer(lambda y: (y.float() + 1) / y.float().std(), weight=0.0),
        loss=lambda y: y.mean(),
    ),
    "a number that is no mask": Fault(
        {
            "what": "aten::mul left the range of float16",
            "hint": "a smaller constant than -100000",
        },
        r"the cause is .*\(mul\)\.$",
        model=lambda: Layer(lambda y: y * -1e5, weight=1.0),
        level="O2",
        loss=lambda y: y.float().mean() * 1e-6,
    ),
    "an exponential that is no temperature": Fault(
        {
            "what": "aten::exp left the range of float16",
            "hint": ".clamp(max=5) on what goes into exp",
        },
        r"the cause is .*\(exp\)\.$",
        model=lambda: Layer(lambda y: y.mean().exp() * 2, weight=0.4),
        level="O2",
        batch=lambda step: torch.full((4, 8), 3.6),
        loss=lambda y: y.float() * 1e-4,
    ),
    "a layer of the script's with the name of one of torch's": Fault(
        {"where": "norm (RMSNorm), in NormalizedLayer", "hint": "amp.initialize(..., keep_fp32=['norm'])"},
        r"the cause is .*\(pow in norm\)\.$",
        model=lambda: NormalizedLayer(),
        level="O2",
        batch=lambda step: RAMP * 1e4,
    ),
    "the same layer of several blocks": Fault(
        {"where": "blocks.0.wo (Linear), in Residuals", "hint": "amp.initialize(..., keep_fp32=['blocks.*.wo'])"},
        r"the cause is .*\(linear in blocks\.0\.wo\)\.$",
        model=lambda: Residuals(),
    ),
    "a high learning rate at a likelihood below 0": Fault(
        {"hint": "a lower learning rate than 1e+30"},
        r"the cause is the growth of fc\.\S+, at lr=1e\+30\.$",
        model=lambda: Layer(lambda y: (y - 1).pow(2).mean() - 200),
        level="O0",
        loss=lambda y: y,
        optimizer=sgd(1e30),
    ),
    "powers in a backward, of what is no gradient": Fault(
        {"pass": "backward", "hint": "compute it in float32: .float() on what goes into LargePowers"},
        r"^40 of 40 steps were skipped; the cause is .*\(the backward of LargePowers\)\.$",
        model=lambda: Layer(lambda y: LargePowers.apply(y), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 1.2),
    ),
    "a variance in half, whose root is small again": Fault(
        {
            "what": "aten::var left the range of float16",
            "hint": "compute it in float32: .float() on what goes into var, and .half() on what comes of it",
        },
        r"the cause is .*\(var\)\.$",
        model=lambda: Normalizing(),
        level="O2",
        batch=lambda step: WIDE * 1e3,
    ),
    "a logarithm that layers take": Fault(
        {"hint": ".float().clamp_min(1e-6) on what goes into it, and .half() on what comes of it before"},
        r"the cause is .*\(log\)\.$",
        model=lambda: LogFirst(),
        level="O2",
        batch=lambda step: torch.full((4, 8), 1 - 1e-5),
    ),
    "a sum in a buffer that becomes NaN": Fault(
        {
            "what": "buffer norm.total was not finite before the forward",
            "hint": "amp.initialize(..., keep_fp32=['norm'])",
        },
        r"the cause is buffer norm\.total of NormalizedBySum, which was not finite\.$",
        model=lambda: NormalizedBySum(),
        level="O2",
    ),
    "a distance whose inverse is 0": Fault(
        {
            "what": "aten::sum left the range of float16: 4 of 4 values",
            "then": "became 0 in reciprocal() of Layer",
            "hint": "compute it in float32: .float() on what goes into sum, and .half() on what comes of it",
        },
        r"the cause is .*\(sum\)\.$",
        model=lambda: Layer(lambda y: shares(y.pow(2).sum(1, keepdim=True)), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 15.0),
    ),
    "an area whose share is 0, under a logarithm": Fault(
        {
            "next what": "aten::mul left the range of float16",
            "next then": "became 0 in div() outside of any module",
            "next hint": "compute the loss in float32: ",
        },
        r"the cause is \S+ \(mul\)\.$",
        count=2,
        model=lambda: Layer(weight=1.0),
        batch=lambda step: torch.full((4, 8), 50.0),
        loss=lambda y: -torch.log((y + 1) / (y * y + 1)).mean(),
    ),
    "costs that begin at inf, and leave float16 beside it": Fault(
        {
            "what": "aten::div left the range of float16",
            "hint": "compute the loss in float32: .float() on what the layers returned",
        },
        r"the cause is \S+ \(div\)\.$",
        model=lambda: Layer(least_costs, weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 15.0),
        loss=lambda y: y.float().mean() * 1e-6,
    ),
    "a loss whose convolution casts of functions make half": Fault(
        {
            "next what": "aten::mul left the range of float16",
            "next hint": "compute the loss in float32: `with amp.disable_casts():` around it",
        },
        r"the cause is \S+ \(mul\)\.$",
        loss=lambda y: squared_means(y).mean(),
        optimizer=sgd(1e-9),
        batch=lambda step: torch.full((4, 8), 20.0),
        model=lambda: Layer(weight=1.0),
        count=2,
    ),
    "a table that the cast loses": Fault(
        {
            "what": "buffer table was not finite before the forward: 1 of 2 values",
            "hint": ".clamp(max=6e4) where it is made: amp.initialize cast it to float16",
        },
        r"^40 of 40 steps were skipped; the cause is buffer table of Weighted, which was not finite\.$",
        model=lambda: Weighted(),
        level="O2",
    ),
    "a sum in a buffer that nothing shows": Fault(
        {},
        r"^none of 40 steps was skipped; buffer total of Summing is not finite at the end\.$",
        model=lambda: Summing(),
        level="O2",
        count=0,
    ),
    "powers, and a product of them that O1 casts": Fault(
        {"hint": ".float() on what goes into mul, and amp.register_float_function(torch, 'matmul')"},
        r"the cause is .*\(mul\)\.$",
        model=lambda: Layer(lambda y: torch.matmul(y * y, torch.full((8, 8), 1e-6)).float(), weight=1.0),
        batch=lambda step: torch.full((4, 8), 100.0),
    ),
}


def explanations(text):
    """The explanations as dicts from labels to texts; "head" is the first line."""
    found = []
    for block in text.split("ampcompat explain: ")[1:]:
        head, *lines = block.splitlines()
        entry = {"head": head}
        for label, value in re.findall(r"^  (\w+) +(.*)$", "\n".join(lines), re.MULTILINE):
            entry.setdefault(label, value)
        found.append(entry)
    return found


def run(fault):
    torch.manual_seed(0)
    model = fault.model()
    optimizer = fault.optimizer(model.parameters())
    explain_overflows()
    model, optimizer = amp.initialize(model, optimizer, opt_level=fault.level, verbosity=0, **fault.options)
    for step in range(1, fault.steps + 1):
        optimizer.zero_grad()
        with amp.scale_loss(fault.loss(model(fault.batch(step))), optimizer) as scaled:
            scaled.backward()
        fault.between(optimizer, step)
        optimizer.step()
    for message in last_words():
        message.emit(as_json=False)


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_cure(capsys, name):
    fault = FAULTS[name]
    run(fault)
    text = capsys.readouterr().err
    assert "keep_fp32=['']" not in text  # the model itself
    *explained, verdict = explanations(text)
    assert re.search(fault.verdict, verdict["head"]), verdict["head"]
    assert len(explained) == fault.count, explained
    for label, part in fault.told.items():
        *after, label = label.split()
        assert part in explained[len(after)][label]
