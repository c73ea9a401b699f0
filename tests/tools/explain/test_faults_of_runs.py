"""Runs with one fault each: explain names the line where it was born, and the row of the page for it.

A step that an ordinary back-off of the loss scale skips is told of in the counts alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from explain_kit import explain, told
from packaging.version import Version
from torch import nn

from ampcompat import amp
from ampcompat._torch import TORCH

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
    """Squares and means, as SSIM computes them."""
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


class Weighted(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([1e5, 1.0]))

    def forward(self, x):
        weight = self.table[0]
        return super().forward(x) * (weight / (weight + 1))


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
    """The second overflows at step 36; the first has no part in it."""

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


@dataclass
class Born:
    """Where a value was born that is not finite.

    Attributes:
        what: The op; or what came from outside, or what a step has left.
        line: The source line, where it does not stand in the table below.
        see: The row of the page.
        became: What its inf became.
    """

    what: str
    line: str = ""
    see: str = ""
    became: str | None = None


@dataclass
class Fault:
    """A run and what is told of it.

    Attributes:
        births: What is told, in order.
    """

    births: list[Born]
    model: Callable[[], nn.Module] = Layer
    level: str = "O1"
    batch: Callable[[int], torch.Tensor] = lambda step: RAMP
    loss: Callable[[torch.Tensor], torch.Tensor] = square
    optimizer: Callable = sgd(1e-3)
    between: Callable = lambda optimizer, step: None
    steps: int = STEPS
    options: dict = field(default_factory=dict)


FAULTS = {
    "an ordinary descent": Fault(
        [],
        level="O2",
        loss=lambda y: (y.float() * 300).sum(),
    ),
    "no overflow at all": Fault(
        [],
    ),
    "a back-off in mid-run": Fault(
        [],
        level="O2",
        loss=lambda y: y.float().mean() * 0.1,
        batch=lambda step: RAMP.abs() * (200 if step == 25 else 1),
    ),
    "a NaN in a batch, after a descent": Fault(
        [Born("input 0 of Layer", see="input")],
        level="O2",
        batch=once(float("nan")),
        loss=lambda y: (y.float() * 300).sum(),
    ),
    "a NaN in a batch, while weights grow": Fault(
        [Born("fill_" if Version("2.15") <= TORCH else "lift_fresh", "x[2, 3] = value", "written")],
        batch=once(float("nan"), at=4),
        optimizer=sgd(20.0),
        steps=4,
    ),
    "an outlier in a batch": Fault(
        [Born("_to_copy", "return self.then(self.fc(x))", "too large")],
        batch=once(1e6),
    ),
    "an outlier that amp casts itself": Fault(
        [Born("_to_copy", see="too large")],
        level="O2",
        batch=once(1e6),
        loss=lambda y: y.float().mean() * 0.1,
    ),
    "a layer beyond float16": Fault(
        [Born("addmm", "return self.norm(x + self.wo(F.relu(self.wi(x))))", "too large", became="NaN")],
        model=Residual,
        batch=lambda step: torch.ones(4, 8),
        steps=3,
    ),
    "-1e9 in a mask": Fault(
        [Born("mul", "return torch.softmax(scores + mask * self.fill, -1)", "constant", became="NaN")],
        model=lambda: Scores(fill=-1e9),
        level="O2",
        steps=3,
    ),
    "a constant that is too large, for the gradient too": Fault(
        [Born("mul", "scores = self.qk(x) * self.sharp", "constant", became="NaN")],
        model=lambda: Scores(sharp=1e6),
        level="O2",
        steps=3,
    ),
    "a temperature that falls without end": Fault(
        [Born("div", "return torch.softmax(super().forward(x) / self.temperature, -1)", "too large", became="NaN")],
        model=lambda: Cooling(),
        level="O1",
    ),
    "a constant that the gradient bears": Fault(
        [Born("mul", see="too large", became="NaN")],
        model=lambda: Layer(lambda y: torch.softmax(y * 300, -1), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 30.0),
        steps=3,
    ),
    "a constant, in place": Fault(
        [Born("mul_", see="constant")],
        model=lambda: Layer(lambda y: y.mul_(1e6)),
        level="O2",
        steps=3,
    ),
    "squares in half, in a module of the model": Fault(
        [Born("pow", see="too large", became="NaN")],
        model=lambda: nn.Sequential(Layer(lambda y: (y * 1000).pow(2)), nn.LayerNorm(8)),
        level="O2",
        steps=3,
    ),
    "exp beyond float32": Fault(
        [Born("exp", see="exp")],
        model=lambda: Layer(lambda y: torch.exp(y * 500)),
        steps=3,
    ),
    "an eps that is 0 in float16": Fault(
        [Born("div", see="div")],
        model=lambda: Layer(lambda y: y / (y.abs().amax(-1, keepdim=True) + 1e-8), weight=0.0),
        level="O2",
        steps=3,
    ),
    "the logarithm of a softmax": Fault(
        [Born("log", see="log")],
        model=lambda: Layer(lambda y: torch.log(torch.softmax(y * 60, -1))),
        level="O2",
        batch=lambda step: WIDE,
        steps=3,
    ),
    "an infinity of the model with finite gradients": Fault(
        [Born("masked_fill", see="written")],
        model=lambda: Layer(lambda y: y.float().masked_fill(y > 0.4, float("inf"))),
        optimizer=sgd(0.5),
        steps=3,
    ),
    "the logarithm of 0 in the loss": Fault(
        [Born("log", see="log")],
        model=lambda: Layer(lambda y: torch.softmax(y * 60, -1)),
        level="O2",
        batch=lambda step: WIDE,
        loss=lambda p: -torch.log(p).mean(),
        steps=4,
    ),
    "a class weight": Fault(
        [Born("weight, given to cross_entropy,", see="tensor")],
        loss=lambda y: F.cross_entropy(y.float(), torch.tensor([0, 1, 2, 3]), INFINITE),
        steps=4,
    ),
    "a mask that leaves nothing, once": Fault(
        [],
        model=lambda: Layer(lambda y: y, weight=0.1),
        batch=lambda step: torch.full((4, 8), 0.0 if step == 31 else 0.5),
        loss=mean_of_what_is_large,
    ),
    "a loss of nothing, with gradients of 0": Fault(
        [Born("nll_loss_forward", "return F.cross_entropy(y.float(), target)", "cross_entropy")],
        batch=lambda step: torch.full((4, 8), 0.0 if step > 30 else 0.5),
        model=lambda: Layer(weight=0.1),
        loss=cross_entropy_of_what_is_large,
    ),
    "what cannot be run again": Fault(
        [Born("_to_copy", "return self.then(self.fc(x))", "too large", became="NaN")],
        model=as_replica,
        batch=lambda step: torch.full((4, 8), 1e6),
        steps=4,
    ),
    "a loss that is too large": Fault(
        [Born("_to_copy", see="gradient", became="NaN")],
        level="O2",
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1e-12),
        steps=6,
    ),
    "the root of 0": Fault(
        [Born("div", see="sqrt, norm", became="NaN")],
        model=lambda: Layer(lambda y: y.float().pow(2).sum(-1).sqrt(), weight=0.0),
        loss=lambda y: y.mean(),
        steps=6,
    ),
    "a gradient at the end of a range": Fault(
        [Born("rsqrt", see="acos", became="NaN")],
        model=lambda: Layer(lambda y: torch.acos(F.normalize(y[:, :1], dim=-1).float())),
        loss=lambda y: y.mean(),
        steps=6,
    ),
    "a function with a wrong backward": Fault(
        [Born("div", "return grad / (x - x)", "div", became="NaN")],
        model=lambda: Layer(lambda y: WrongBackward.apply(y)),
        steps=6,
    ),
    "a static scale that is too high": Fault(
        [Born("_to_copy", see="gradient", became="NaN")],
        level="O2",
        options={"loss_scale": 2.0**24},
        steps=3,
    ),
    "a static scale that is too high for the half output of a model": Fault(
        [],
        options={"loss_scale": 2.0**30},
    ),
    "weights that grow from next to nothing to a usual size": Fault(
        [Born("log", see="growth")],
        model=lambda: Layer(lambda y: torch.log(torch.sigmoid(y * 60)), weight=1e-3),
        level="O0",
        loss=lambda y: -y.mean(),
        batch=once(1e4, at=3),
        optimizer=sgd(1.0),
    ),
    "weights that grow less, but the loss with them": Fault(
        [Born("mm", "return self.then(self.fc(x))", "growth"), Born("addmm", "return self.then(self.fc(x))", "growth")],
        model=lambda: Layer(weight=0.1),
        level="O2",
        loss=lambda y: y.float().pow(2).sum() * 0.03125 * 0.25,
        batch=lambda step: torch.full((4, 8), 100.0),
        optimizer=sgd(1e-3),
        options={"max_loss_scale": 16},
    ),
    "weights that grow with a learning rate that nothing caps": Fault(
        [Born("pow", see="growth")],
        model=lambda: Layer(lambda y: y.pow(2).sum()),
        level="O0",
        loss=lambda y: y,
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=0.01 * 1.3**step),
    ),
    "weights that have grown, and that overflow again when they no longer do": Fault(
        [Born("addmm", "return self.then(self.fc(x))", "growth")],
        loss=lambda y: 1e6 - y.float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step in (9, 35) else 1.0),
        optimizer=sgd(80.0),
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=80.0 if step < 12 else 0.0),
    ),
    "weights that grow slowly, in a run whose loss does not fall": Fault(
        [Born("addmm", "return self.then(self.fc(x))", "too large")],
        loss=lambda y: 1 - y.float().mean() + y.detach().float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 35 else 1.0),
        optimizer=sgd(2.4),
    ),
    "weights that grow slowly, of which the value is not made": Fault(
        [Born("mul", "return grown + torch.sigmoid(self.second(x)) * (1e6 if self.step > 35 else 1.0)", "constant")],
        model=lambda: TwoHeads(),
        level="O2",
        loss=lambda y: 1 - y.float().mean() + y.detach().float().mean(),
        batch=lambda step: torch.full((4, 8), 1.0),
        optimizer=sgd_of_first_head,
    ),
    "weights that have grown, and another overflow later": Fault(
        [Born("addmm", "return self.then(self.fc(x))", "growth"), Born("mul", see="constant")],
        level="O2",
        loss=lambda y: (y.half() * 1e6 if y.detach().mean() > 1e4 else 1e6 - y).float().mean(),
        batch=lambda step: torch.full((4, 8), 1e3 if step == 9 else 20.0 if step in (35, 36, 37) else 1.0),
        optimizer=sgd(80.0),
        between=lambda optimizer, step: optimizer.param_groups[0].update(lr=80.0 if step < 12 else 0.0),
    ),
    "weights that grow far, under the log of a softmax": Fault(
        [Born("div", see="growth")],
        model=lambda: Layer(lambda y: torch.log(torch.softmax(y.float(), -1))),
        loss=lambda y: -y[:, 0].mean(),
        batch=lambda step: WIDE,
        optimizer=sgd(500.0),
    ),
    "weights that a loss made grow that was explained": Fault(
        [
            Born("_to_copy", see="gradient", became="NaN"),
            Born("_to_copy", "return self.then(self.fc(x))", "growth", became="NaN"),
        ],
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1e-2),
        steps=30,
    ),
    "half weights that a loss made grow that was explained": Fault(
        [Born("_to_copy", see="gradient", became="NaN"), Born("half weight", see="growth")],
        level="O2",
        loss=lambda y: (y.float() * 1e7).sum(),
        optimizer=sgd(1.0),
    ),
    "weights that a backward made grow, once the scale had come down for it": Fault(
        [
            Born("_to_copy", "return x.float().pow(2).to(x.dtype)", "growth"),
            Born("addmm", "return self.then(self.fc(x))", "growth"),
        ],
        model=lambda: Layer(LargeBackward.apply),
        level="O2",
        batch=lambda step: WIDE / 5,
        loss=lambda y: y.float().mean() * 1e-2,
        optimizer=sgd(1e-2),
        steps=30,
    ),
    "a learning rate that is too high": Fault(
        [Born("mm", "return self.then(self.fc(x))", "growth"), Born("half weight", see="growth")],
        level="O2",
        batch=lambda step: WIDE,
        optimizer=sgd(500.0),
    ),
    "Adam's eps at O3": Fault(
        [Born("weight", see="step")],
        level="O3",
        loss=lambda y: y[:, :3].float().sum(),
        optimizer=adam,
        steps=4,
    ),
    "an eps of 0": Fault(
        [Born("weight", see="step")],
        loss=lambda y: y[:, :3].float().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=0.0),
        steps=4,
    ),
    "gradients that the script spoils": Fault(
        [Born("weight", see="step")],
        between=lambda optimizer, step: [
            p.grad.div_(0 if step == 31 else 1) for p in amp.master_params(optimizer) if p.grad is not None
        ],
    ),
    "weights that the script spoils between a block and its step": Fault(
        [Born("parameter fc.weight of Layer", see="parameter")],
        level="O2",
        between=lambda optimizer, step: [
            p.detach().fill_(float("inf")) for p in amp.master_params(optimizer) if step == 31
        ],
    ),
    "weights that the script spoils, unseen, before a step": Fault(
        [Born("weight", see="step")],
        level="O2",
        between=lambda optimizer, step: [
            p.data.fill_(float("inf")) for p in amp.master_params(optimizer) if step == 31
        ],
    ),
    "a checkpoint that is not finite": Fault(
        [Born("parameter fc.weight of Layer", see="parameter")],
        model=lambda: Layer(weight=float("nan")),
        steps=3,
    ),
    "an input that is half at O1": Fault(
        [Born("input 0 of Layer", see="input")],
        batch=lambda step: once(1e6)(step).half(),
    ),
    "the spread of one row": Fault(
        [Born("std", see="std")],
        model=lambda: Layer(lambda y: (y.float() - y.float().mean(0)) / (y.float().std(0) + 1)),
        batch=lambda step: RAMP[: 1 if step == 31 else 4],
    ),
    "labels that are all left out": Fault(
        [Born("nll_loss_forward", see="cross_entropy")],
        model=lambda: Layer(lambda y: F.cross_entropy(y.float(), torch.full((len(y),), -100))),
        loss=lambda y: y,
        steps=3,
    ),
    "a division by next to nothing": Fault(
        [Born("_to_copy", see="gradient", became="NaN"), Born("mul", see="growth")],
        level="O1",
        model=lambda: Layer(lambda y: (y * y.detach()).sum(1) / (y.float().norm(dim=1) * 0 + 1e-7)),
        loss=lambda y: y.mean(),
    ),
    "a weight that half does not hold": Fault(
        [Born("parameter fc.weight of Layer", see="parameter")],
        model=lambda: Layer(weight=1e5),
        level="O2",
        steps=3,
    ),
    "a division by a spread of 0, which is no count": Fault(
        [Born("div", see="div")],
        model=lambda: Layer(lambda y: (y.float() + 1) / y.float().std(), weight=0.0),
        loss=lambda y: y.mean(),
        steps=3,
    ),
    "an exponential that is no temperature": Fault(
        [Born("exp", see="too large")],
        model=lambda: Layer(lambda y: y.mean().exp() * 2, weight=0.4),
        level="O2",
        batch=lambda step: torch.full((4, 8), 3.6),
        loss=lambda y: y.float() * 1e-4,
        steps=3,
    ),
    "a layer of the script's with the name of one of torch's": Fault(
        [Born("pow", "squares = x.pow(2).mean(-1, keepdim=True)", "too large", became="NaN")],
        model=lambda: NormalizedLayer(),
        level="O2",
        batch=lambda step: RAMP * 1e4,
        steps=3,
    ),
    "a high learning rate at a likelihood below 0": Fault(
        [Born("pow", see="growth")],
        model=lambda: Layer(lambda y: (y - 1).pow(2).mean() - 200),
        level="O0",
        loss=lambda y: y,
        optimizer=sgd(1e30),
        steps=4,
    ),
    "powers in a backward, of what is no gradient": Fault(
        [Born("mul", "squares = powers * powers", "too large", became="NaN")],
        model=lambda: Layer(lambda y: LargePowers.apply(y), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 1.2),
        steps=6,
    ),
    "a variance in half, whose root is small again": Fault(
        [Born("var", "deviation = torch.sqrt(torch.var(x, dim=0) + 1e-5)", "too large")],
        model=lambda: Normalizing(),
        level="O2",
        batch=lambda step: WIDE * 1e3,
        steps=3,
    ),
    "a logarithm that layers take": Fault(
        [Born("log", "return super().forward(torch.log(x) - torch.log(1 - x))", "log", became="NaN")],
        model=lambda: LogFirst(),
        level="O2",
        batch=lambda step: torch.full((4, 8), 1 - 1e-5),
        steps=3,
    ),
    "a sum in a buffer that becomes NaN": Fault(
        [Born("buffer norm.total of NormalizedBySum", see="buffer")],
        model=lambda: NormalizedBySum(),
        level="O2",
    ),
    "a distance whose inverse is 0": Fault(
        [Born("sum", see="too large", became="0")],
        model=lambda: Layer(lambda y: shares(y.pow(2).sum(1, keepdim=True)), weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 15.0),
        steps=3,
    ),
    "an area whose share is 0, under a logarithm": Fault(
        [Born("mul", see="too large", became="0")],
        model=lambda: Layer(weight=1.0),
        batch=lambda step: torch.full((4, 8), 50.0),
        loss=lambda y: -torch.log((y + 1) / (y * y + 1)).mean(),
        steps=4,
    ),
    "costs that begin at inf, and leave float16 beside it": Fault(
        [
            Born(
                "div",
                "paths = -torch.stack([table[:, column - 1], table[:, column]]) / 0.01  # here",
                "too large",
                became="NaN",
            )
        ],
        model=lambda: Layer(least_costs, weight=1.0),
        level="O2",
        batch=lambda step: torch.full((4, 8), 15.0),
        loss=lambda y: y.float().mean() * 1e-6,
        steps=3,
    ),
    "a loss whose convolution casts of functions make half": Fault(
        [Born("mul", "return means * means * torch.full_like(means, 4.0)", "too large")],
        loss=lambda y: squared_means(y).mean(),
        optimizer=sgd(1e-9),
        batch=lambda step: torch.full((4, 8), 20.0),
        model=lambda: Layer(weight=1.0),
        steps=4,
    ),
    "a table that the cast loses": Fault(
        [Born("buffer table of Weighted", see="buffer")],
        model=lambda: Weighted(),
        level="O2",
        steps=3,
    ),
    "powers, and a product of them that O1 casts": Fault(
        [Born("mul", see="too large")],
        model=lambda: Layer(lambda y: torch.matmul(y * y, torch.full((8, 8), 1e-6)).float(), weight=1.0),
        batch=lambda step: torch.full((4, 8), 100.0),
        steps=3,
    ),
}


def run(fault):
    torch.manual_seed(0)
    model = fault.model()
    optimizer = fault.optimizer(model.parameters())
    explain()
    model, optimizer = amp.initialize(model, optimizer, opt_level=fault.level, verbosity=0, **fault.options)
    for step in range(1, fault.steps + 1):
        optimizer.zero_grad()
        with amp.scale_loss(fault.loss(model(fault.batch(step))), optimizer) as scaled:
            scaled.backward()
        fault.between(optimizer, step)
        optimizer.step()


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(capsys, name):
    fault = FAULTS[name]
    run(fault)
    seen = told(capsys)
    named = [one["what"] if one["kind"] == "step" else one["op"] for one in seen.faults]
    assert named == [one.what for one in fault.births]
    for one, born in zip(seen.faults, fault.births, strict=True):
        assert born.line in (one.get("source") or "")
        assert one["see"][0] == born.see
        assert born.became in (None, one.get("became"))
    assert seen.counts["steps"] == fault.steps
    lost = sum(seen.counts["lost"].values())
    assert seen.counts["skipped"] <= lost <= fault.steps
    assert bool(lost) or not fault.births
