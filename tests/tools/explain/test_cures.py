"""The first hint works: each script is run as it is, and again with what the hint says."""

import re

import pytest
import torch
import torch.nn.functional as F
from amp_training import last_words, reset
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4
STEPS = 30


def cross_entropy(model, factor=1.0):
    return F.cross_entropy(model(X).float(), Y) * factor


def train(model, level, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), **options):
    model, optimizer = amp.initialize(model, optimizer(model.parameters()), opt_level=level, verbosity=0, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with amp.scale_loss(loss(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


class Layers(nn.Module):
    """Two layers and what is between them, or after."""

    def __init__(self, between=lambda h: h, after=lambda y: y, bias=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between, self.after = between, after
        if bias is not None:
            nn.init.zeros_(self.first.weight)
            nn.init.constant_(self.first.bias, bias)

    def forward(self, x):
        return self.after(self.second(self.between(self.first(x))))


# -- scripts: ``cure`` is None, or what the first hint has captured ----------------------------------------------------
def static_scale(cure):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    train(model, "O2", lambda m: cross_entropy(m, 200.0), loss_scale=2.0**17 if cure is None else cure[1])


def scale_that_cannot_come_down(cure):
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    train(model, "O2", lambda m: cross_entropy(m, 200.0), min_loss_scale=2.0**20 if cure is None else None)


def half_too_early(cure):
    if cure is None:
        train(Layers(lambda h: (h.float() * 1e6).half() / 1e3), "O2")
    else:
        train(Layers(lambda h: (h.float() * 1e6 / 1e3).half()), "O2")


class Vae(nn.Module):
    def __init__(self, bias, exponent, after):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)
        self.exponent, self.after = exponent, after
        nn.init.constant_(self.encode.bias[4:], bias)

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, -1)
        std = torch.exp(self.exponent(logvar))
        noisy = mean + self.after(std)
        return self.decode(noisy)


def vae_in_half(cure):
    exponent, after = (lambda t: t), (lambda std: std / std.amax())
    if cure is not None:
        exponent, after = (lambda t: t.float()), (lambda std: (std / std.amax()).half())
    train(Vae(14.0, exponent, after), "O2", lambda m: m(X).float().pow(2).mean())


def softmax_by_hand(cure):
    exponent = (lambda t: t) if cure is None else (lambda t: eval(cure[1], {"x": t, "dim": -1}))
    train(Vae(14.0, exponent, lambda std: std / std.sum()), "O2", lambda m: m(X).float().pow(2).mean())


class Surrogate(torch.autograd.Function):
    """The gradient of a sigmoid for that of a step, written out."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x)
        ctx.most = most
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        e = torch.exp((-8 * x).clamp(max=ctx.most))
        return grad * e / (1 + e) ** 2, None


def exponential_that_float32_just_holds(cure):
    most = 1e4 if cure is None else float(cure[1])
    train(Layers(lambda h: Surrogate.apply(h * 1e-3 - 8.0, most)), "O3")


def vae_far_beyond_half(cure):
    """What float32 would hold: but the decoder cannot take it."""
    exponent = (lambda t: t) if cure is None else (lambda t: t.clamp(max=float(cure[1])))
    train(Vae(30.0, exponent, lambda t: t), "O2", lambda m: m(X).float().pow(2).mean() * 1e-4)


class Temperature(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.fc, self.logit_scale, self.most = nn.Linear(8, 4), nn.Parameter(torch.tensor(11.2)), most

    def forward(self, x):
        return self.logit_scale.clamp(max=self.most).exp() * self.fc(x)


def exponential_behind_a_layer(cure):
    """The layers are where the value leaves the range, and the exponential is why."""
    most = 100.0 if cure is None else float(cure[1])
    model = Vae(30.0, lambda t: t.clamp(max=most), lambda std: std)
    model.decode = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    train(model, "O1", lambda m: m(X).float().pow(2).mean() * 1e-4)


def temperature(cure):
    train(Temperature(20.0 if cure is None else float(cure[1])), "O2")


def empty_selection(cure):
    def loss(model):
        y = model(X).float()
        chosen, target = y[Y > 5], X[Y > 5, :4]
        if cure is None:
            return F.smooth_l1_loss(chosen, target) + y.mean()
        return F.smooth_l1_loss(chosen, target, reduction="sum") / max(len(chosen), 1) + y.mean()

    train(Layers(), "O1", loss)


def end_of_range(cure):
    def loss(model):
        y = model(X)
        cos = F.normalize(torch.stack([y[:, 0], y[:, 0] * 0], 1), dim=1)[:, 0]  # 1 or -1
        cos = cos @ torch.eye(16)  # half at O1
        return torch.acos(cos if cure is None else cos.clamp(float(cure[1]), float(cure[2]))).mean()

    train(Layers(), "O1", loss)


def end_of_range_in_the_forward(cure):
    """Float16 rounds it to -1; the bound is at the other end, and not 1."""

    def after(y):
        x = torch.tanh(y * 1e3).clamp(max=0.9)
        return torch.atanh(x if cure is None else x.clamp(float(cure[1]), float(cure[2])))

    train(Layers(after=after), "O2")


def hyperbolic_distance_of_nothing(cure):
    """``arccosh`` is another name of ``acosh``."""

    def loss(model):
        x = 1.0 + (model(X).float() * 0).abs()
        return torch.arccosh(x if cure is None else x.clamp_min(float(cure[1]))).mean()

    train(Layers(), "O1", loss)


class NormalizedPool(torch.autograd.Function):
    """Its name is that of a norm; what its backward divides by is a square that float16 does not hold."""

    @staticmethod
    def forward(ctx, x):
        norm = x.abs().amax()
        ctx.save_for_backward(x, norm)
        return x / norm

    @staticmethod
    def backward(ctx, grad):
        x, norm = ctx.saved_tensors
        return grad * norm / (norm * norm)


def square_that_underflows_under_a_division(cure):
    def after(y):
        y = y * 1e-4
        return NormalizedPool.apply(y) if cure is None else NormalizedPool.apply(y.float()).half()

    train(Layers(after=after), "O2", lambda m: m(X).float().mean() * 1e-2)


def padding_that_is_normalized(cure):
    """Rows of zeros: the gradient of what normalizes them is divided by its eps."""
    rows = X * (torch.arange(16) % 2)[:, None]
    model = nn.Linear(8, 4, bias=False)
    train(model, "O1", lambda m: F.normalize(m(rows), dim=-1, eps=1e-12 if cure is None else float(cure[1])).sum())


def gradient_of_a_saturated_logarithm(cure):
    """That of a squashed policy: 1 - a * a is 0, and its eps is next to it."""

    def after(y):
        x = 1 - torch.tanh(y * 30).pow(2) + 1e-7
        return torch.log(x if cure is None else x.clamp_min(float(cure[1])))

    train(Layers(after=after), "O2", lambda m: m(X).float().mean())


def number_of_zero(cure):
    """The bias correction of an average whose updates nobody counts."""
    count = 0 if cure is None else 1
    train(Layers(), "O1", lambda m: (m(X).float() / (1 - 0.9**count)).mean())


def variance_below_zero(cure):
    """The mean of squares less the square of the mean, in half."""

    def loss(model):
        y = model(X) + 100
        mean = y.mean(-1, keepdim=True)
        variance = (y * y).mean(-1, keepdim=True) - mean * mean - 1e-2
        if cure is not None:
            variance = variance.clamp_min(float(cure[1]))
        return ((y - mean) * torch.rsqrt(variance)).float().pow(2).mean() * 1e-3

    train(Layers(), "O2", loss)


def count_of_zero(cure):
    """The weight of a class that is not there is its inverse frequency."""

    def loss(model):
        count = torch.bincount(Y, minlength=5).float()
        weight = len(Y) / count.clamp_min(0.0 if cure is None else float(cure[1]))
        return model(X).float().pow(2).mean() * weight[4]

    train(Layers(), "O1", loss)


def layers_that_grow(cure):
    """Each of the layers makes it twice as large."""
    model = nn.Module()
    model.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(16)])
    model.norm = nn.LayerNorm(8)
    model.forward = lambda x: model.norm(model.blocks(x))
    with torch.no_grad():
        for layer in model.blocks:
            nn.init.eye_(layer.weight).mul_(2.0)
        model.blocks[0].weight.mul_(8.0)
    train(model, "O1" if cure is None else cure[1], lambda m: m(X).float()[:, :4].pow(2).mean())


def batch_without_positives(cure):
    """The only denominator is 0, which is a number of anchors."""

    def loss(model):
        count = (Y > 5).sum().float()
        return model(X).float().pow(2).sum() / (count if cure is None else count.clamp_min(float(cure[1])))

    train(Layers(), "O1", loss)


class LinearAttention(nn.Module):
    def forward(self, query, key, value):
        sums = torch.einsum("sd,sm->md", key, value)
        scale = 1 / (torch.einsum("sd,d->s", query, key.sum(0)) + 1e-2)
        return torch.einsum("sd,md,s->sm", query, sums, scale)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attention, self.out = nn.Linear(8, 24), LinearAttention(), nn.Linear(8, 4)
        self.qkv.bias.data.fill_(60.0)

    def forward(self, x):
        return self.out(self.attention(*self.qkv(x.repeat(16, 1)).chunk(3, -1)))[:16]


def several_lines_beyond_float16(cure):
    """One in float32 is not enough: the module around them is kept."""
    train(Attending(), "O2", **({} if cure is None else {"keep_fp32": cure[1]}))


class Scores(nn.Module):
    def forward(self, query, key, value):
        return torch.softmax(query @ key.t(), -1) @ value


def scores_in_half(cure):
    """The module is kept: no cast to float32 and back is to be written."""
    model = Attending()
    model.attention = Scores()
    model.qkv.bias.data.fill_(120.0)
    train(model, "O2", **({} if cure is None else {"keep_fp32": cure[1]}))


class Normed(torch.optim.Optimizer):
    """Divides by the norm of each gradient."""

    def __init__(self, params, eps):
        super().__init__(params, {"lr": 1e-3, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad / (param.grad.norm() + group["eps"])


def optimizer_that_divides_by_a_norm(cure):
    train(Layers(), "O1", lambda m: m(X)[:, :2].float().mean() * 0, lambda p: Normed(p, 0.0 if cure is None else 1e-6))


def vae_beyond_float32(cure):
    exponent = (lambda t: t) if cure is None else (lambda t: t.clamp(max=float(cure[1])))
    train(Vae(200.0, exponent, lambda t: t), "O1", lambda m: m(X).float().pow(2).mean() * 1e-4)


def optimizer_that_amp_does_not_know(cure):
    model = Layers(F.relu)
    first = torch.optim.SGD(model.first.parameters(), lr=0.1)
    second = torch.optim.SGD(model.second.parameters(), lr=0.1)
    both = [first, second]
    if cure is None:
        model, first = amp.initialize(model, first, opt_level="O1", verbosity=0)
    else:
        model, both = amp.initialize(model, both, opt_level="O1", verbosity=0)
    for _ in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        with amp.scale_loss(cross_entropy(model), first if cure is None else both) as scaled:
            scaled.backward()
        first.step()
        second.step()


def mask(cure, fill=-1e9):
    def attend(h):
        ignored = torch.zeros_like(h)
        ignored[:, 4:] = 1
        ignored[0] = 1
        return torch.softmax(h + ignored * (fill if cure is None else float(cure[1])), -1)

    train(Layers(attend), "O2")


class Masked(nn.Module):
    """Attention whose mask moves with the model: amp.initialize casts buffers, too."""

    def __init__(self, fill):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("fill", torch.tensor(fill))
        self.register_buffer("ignored", torch.eye(4)[0])

    def forward(self, x):
        return torch.softmax(self.fc(x) + self.ignored * self.fill, -1)


def mask_as_a_tensor(cure):
    """The fill is no number that an op is given, but a tensor of its own."""
    ignored = torch.zeros(16, 8, dtype=torch.bool)
    ignored[:, 4:] = True
    ignored[0] = True

    def attend(h):
        fill = torch.tensor(-1e9 if cure is None else float(cure[1]))
        return torch.softmax(torch.where(ignored, fill, h), -1)

    train(Layers(attend), "O2")


def constant_as_a_tensor(cure):
    """It is to be farther than anything else, and another result is multiplied by it."""

    def nearest(h):
        far = torch.tensor([1e10 if cure is None else 1e4]).to(h.dtype)
        return torch.minimum(h, far) + F.relu(-far * (h - h))

    train(Layers(nearest), "O2")


def mask_in_a_buffer(cure):
    train(Masked(-1e9 if cure is None else float(cure[1])), "O2")


class Recurrent(nn.Module):
    """Its state is multiplied in each turn."""

    def __init__(self, bound):
        super().__init__()
        self.hidden, self.out, self.bound = nn.Linear(8, 8), nn.Linear(8, 4), bound
        self.hidden.weight.data.copy_(3.0 * torch.eye(8))

    def forward(self, x):
        state = x
        for _ in range(14):
            state = self.bound(self.hidden(state) + x)
        return self.out(state)


def loop_that_grows(cure):
    train(Recurrent(torch.relu if cure is None else getattr(torch, cure[1])), "O1")


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.first.weight.data.mul_(80.0)

    def forward(self, x):
        h = self.first(x)
        return self.norm(self.second(h * h * h))


def op_and_layer_beyond_float16(cure):
    """The op is the script's, and the layer after it takes half alone: the module around both is kept."""
    model = nn.Module()
    model.cubes, model.fc = Cubes(), nn.Linear(8, 4)
    model.forward = lambda x: model.fc(model.cubes(x))
    train(model, "O1", **({} if cure is None else {"keep_fp32": cure[1]}))


def op_and_layer_beyond_float16_at_o2(cure):
    """The model itself would have to be kept."""
    model = nn.Sequential(Cubes(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].second.weight.mul_(100.0)
        model[0].norm = nn.Identity()
    model.append(nn.LayerNorm(4))
    train(model, "O2" if cure is None else cure[1])


def divergence_from_a_target_of_zero(cure):
    """Both sides are the model's, as where it shall be as sure of a changed input."""

    def loss(model):
        target = torch.softmax(model(X).float() * 1e3, -1)
        if cure is not None:
            target = getattr(target, cure[1])()
        return F.kl_div(F.log_softmax(model(-X).float(), -1), target, reduction="batchmean") * 1e-3

    train(Layers(), "O1", loss)


class Box(nn.Module):
    """Its size is an exponential, and only the loss follows."""

    def __init__(self, most):
        super().__init__()
        self.fc, self.most = nn.Linear(8, 4), most
        nn.init.constant_(self.fc.bias, 18.0)

    def forward(self, x):
        return torch.exp(self.fc(x).clamp(max=self.most)) * 3.0


def size_of_a_box(cure):
    train(Box(90.0 if cure is None else float(cure[1])), "O2", lambda m: m(X).float().pow(2).mean() * 1e-4)


def log_of_softmax_that_is_not_masked(cure):
    """Its forward is -inf where no label is, which costs nothing but the gradient."""

    def loss(model):
        y = (model(X) * 100).clamp(max=0).float()
        y = y - 200 * (torch.arange(4) != Y[:, None])
        log = torch.log(torch.softmax(y, -1)) if cure is None else F.log_softmax(y, -1)
        return F.nll_loss(log, Y)

    train(Layers(), "O1", loss)


def targets_that_are_large(cure):
    target = torch.full((16, 4), 12000.0).half()

    def loss(model):
        y = model(X)
        error = (y if cure is None else y.float()) - target
        return (error * error).mean() * 1e-3

    train(Layers(), "O1", loss)


def similarities(cure):
    """An operator: torch.matmul is another function."""

    def loss(model):
        y = model(X) * 500
        if cure is None:
            similar = y @ y.t()
        else:
            with amp.disable_casts():
                similar = y.float() @ y.float().t()
        return F.cross_entropy(similar * 1e-3, torch.arange(16)) * 1e-2

    train(Layers(), "O1", loss)


def gradient_of_a_logarithm_before_the_loss(cure):
    """The model's softmax is 0 in half, and the logarithm that comes after divides the gradient by its eps."""

    def loss(model):
        p = model(X).float()
        log = torch.log(p + 1e-12) if cure is None else torch.log(p.clamp_min(float(cure[1])))
        return -log.gather(1, Y[:, None]).mean()

    train(Layers(after=lambda y: torch.softmax(y * 30, -1)), "O2", loss)


def resolution_in_half(cure):
    """It is computed before the model, from numbers of the batch."""
    height, width = torch.full((16,), 720.0).half(), torch.full((16,), 1280.0).half()

    def loss(model):
        area = height * width if cure is None else height.float() * width.float()
        ratio = (area / 2**18).sqrt()
        return (model(X).float() * ratio.float()[:, None]).pow(2).mean()

    train(Layers(), "O1", loss)


def ratio_to_a_root(cure):
    """As a signal to noise ratio: the gradient of the root is not finite either."""

    def loss(model):
        error = (model(X).float() * 0).pow(2).mean(1)
        least = 0.0 if cure is None else float(cure[1])
        return torch.log10(1.0 / torch.sqrt(error + least)).mean()

    train(Layers(), "O1", loss)


def gradient_of_a_logarithm(cure):
    """That of a generator: the eps that is added in half is lost, and the scale comes down for ever."""
    eps = 1e-8 if cure is None else float(cure[1])
    model = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid())
    model[0].bias.data.fill_(-13.5)
    train(model, "O1", lambda m: -torch.log(m(X) + eps).sum())


def probabilities_that_are_masked(cure):
    """The entropy of a policy whose last action is never allowed."""

    def loss(model):
        p = torch.softmax(model(X).float().masked_fill(torch.arange(4) == 3, -torch.inf), -1)
        log = torch.log(p if cure is None else p.clamp_min(float(cure[1])))
        return (p * log).sum(-1).mean()

    train(Layers(), "O1", loss)


def two_logarithms(cure):
    def loss(model):
        y = model(X)[:, 0] * 1e3
        target = (Y > 1).float()
        if cure is not None:
            return -(target * F.logsigmoid(y.float()) + (1 - target) * F.logsigmoid(-y.float())).mean()
        p = torch.sigmoid(y)
        return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()

    train(Layers(), "O1", loss)


def ratio_of_probabilities(cure):
    """As that of PPO, whose gradient is multiplied by the ratio."""

    def loss(model):
        difference = model(X)[:, 0].float() + 11
        ratio = torch.exp(difference if cure is None else difference.clamp(max=float(cure[1])))
        return (ratio * 50).mean()

    train(Layers(), "O1", loss)


class RootMeanSquare(nn.Module):
    def __init__(self, wide, narrow):
        super().__init__()
        self.wide, self.narrow = wide, narrow

    def forward(self, x):
        square = x.pow(2).mean(-1, keepdim=True) + 1e-6
        return x * self.narrow(torch.rsqrt(self.wide(square)))


def gradient_of_a_small_root(cure):
    """It takes the cube of the root, which is no matter of the loss scale."""
    same = lambda t: t  # noqa: E731
    model = nn.Sequential(nn.Linear(8, 8), nn.Module(), nn.Linear(8, 4))
    model[0].weight.data.mul_(1e-3)
    model[0].bias.data.zero_()
    model[1] = RootMeanSquare(same, same) if cure is None else RootMeanSquare(torch.Tensor.float, torch.Tensor.half)
    train(model, "O3", loss_scale="dynamic")


def inverse_root_of_zero(cure):
    def loss(model):
        y = model(X).float()
        square = (y * 0).pow(2).sum(-1, keepdim=True) + (0.0 if cure is None else float(cure[1]))
        return (y * torch.rsqrt(square)).sum(-1).mean()

    train(Layers(), "O1", loss)


class RunningSum(nn.Module):
    """What a normalizer has seen: a sum, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.total += x.abs().sum(0) * 1e3
        self.count += len(x)
        return x - self.total / self.count / 1e3


def sum_in_a_buffer(cure):
    model = nn.Module()
    model.norm, model.fc = RunningSum(), nn.Linear(8, 4)
    model.forward = lambda x: model.fc(model.norm(x))
    train(model, "O2", **({} if cure is None else {"keep_fp32": cure[1]}))


def infinite_mask(cure):
    def attend(h):
        return torch.softmax(h.float().masked_fill(h < 10, -torch.inf if cure is None else float(cure[1])), -1)

    train(Layers(attend), "O1")


def eps(cure):
    train(
        Layers(lambda h: h / (h.abs().amax(-1, keepdim=True) + (1e-8 if cure is None else float(cure[1]))), bias=0.0),
        "O2",
    )


def target_beyond_one(cure):
    """A mask from a file, in which 255 is what nobody has annotated."""
    target = (Y[:, None] == torch.arange(4)).float()
    if cure is None:
        target[::3] = 255.0
    model = Layers(F.relu)
    train(
        model,
        "O1",
        lambda m: F.binary_cross_entropy_with_logits(m(X).float(), target),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    )


def zero_norm(cure):
    add = 0.0 if cure is None else float(cure[1])
    train(Layers(lambda h: h.float() / (h.float().norm(dim=-1, keepdim=True) + add), bias=0.0), "O1")


def root_of_zero(cure):
    def loss(model):
        square = (model(X).float() * 0).pow(2).sum(1)
        return (square if cure is None else square.clamp_min(float(cure[1]))).sqrt().mean()

    train(Layers(bias=0.0), "O1", loss)


def exponentials_that_are_divided_by_their_sum(cure):
    """As Sinkhorn's normalization begins."""

    def loss(model):
        scores = model(X).float() * 1e3
        scores = scores if cure is None else eval(cure[1], {"x": scores, "dim": -1})
        shares = scores.exp()
        return (shares / shares.sum() * (Y == 1)[:, None]).sum()

    train(Layers(), "O1", loss)


def root_of_squares_that_underflow(cure):
    """The norm of a gradient, as in a penalty: in half its square is 0."""

    def norm(y):
        y = y * 1e-5
        squares = (y if cure is None else y.float()).pow(2).sum(1)
        return (squares if cure is None else squares.clamp_min(float(cure[1]))).sqrt()

    train(Layers(after=norm), "O2", lambda m: m(X).float().mean() * 1e2)


def root_of_squares_of_which_some_underflow(cure):
    """The same at O1, where some rows are not as small."""

    def norm(y):
        y = (y if cure is None else y.float()) * torch.where(torch.arange(16) % 4 > 0, 1e-5, 1.0).to(y.dtype)[:, None]
        squares = (y * y).sum(1)
        return (squares if cure is None else squares.clamp_min(float(cure[1]))).sqrt()

    train(Layers(after=norm), "O1", lambda m: m(X).float().mean())


def logarithm_of_a_bound_that_is_one_in_half(cure):
    """The focal loss of CenterNet."""

    def loss(model):
        heat = torch.sigmoid(model(X) * 20)
        heat = torch.clamp(heat if cure is None else heat.float(), min=1e-4, max=1 - 1e-4)
        return -(torch.log(1 - heat) * heat.pow(2)).mean()

    train(Layers(), "O1", loss)


def end_of_a_domain_that_is_one_in_half(cure):
    """Actions that are squashed: in half some are 1."""

    def unsquashed(h):
        action = torch.tanh(h * 10)
        return torch.atanh((action if cure is None else action.float()).clamp(-1 + 1e-6, 1 - 1e-6)).to(h.dtype)

    train(Layers(between=unsquashed), "O2", lambda m: m(X).float().mean() * 1e-3)


def log_of_a_bound_in_float32(cure):
    """A bound in float32 is what it says: the other end has none."""

    def loss(model):
        x = torch.tanh(model(X).float() * 50).clamp(max=1 - 1e-6)
        return torch.atanh(x if cure is None else x.clamp(float(cure[1]), float(cure[2]))).mean()

    train(Layers(), "O1", loss)


def log_of_a_bound_that_is_one_in_float32(cure):
    """Nor is a bound of 1 - 1e-8 one in float32."""

    def loss(model):
        p = torch.sigmoid(model(X).float() * 50).clamp(max=1 - 1e-8).square()
        return -torch.log((1 - p) if cure is None else (1 - p).clamp_min(float(cure[1]))).mean()

    train(Layers(), "O1", loss)


def root_of_rows_that_a_mask_leaves_nothing_of(cure):
    """Some of the others underflow, but most zeros are the mask's."""

    def norm(y):
        keep = (torch.arange(16) % 4 == 0).to(y.dtype)[:, None]
        y = torch.where(torch.arange(4) == 0, y * 1e-5, y + 3) * keep
        squares = (y * y).sum(1)
        return (squares if cure is None else squares.clamp_min(float(cure[1]))).sqrt()

    train(Layers(after=norm), "O1", lambda m: m(X).float().mean())


def gradients_that_the_block_of_another_optimizer_adds(cure):
    """The loss of what a generator made, in the generator's block: the discriminator steps with it scaled."""
    fake, real = Layers(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (fake, real)]
    amp.initialize([fake, real], optimizers, opt_level="O1", verbosity=0, num_losses=2)
    generator, discriminator = optimizers
    for _ in range(STEPS):
        discriminator.zero_grad()
        generator.zero_grad()
        with amp.scale_loss(real(torch.randn(16, 4)).float().pow(2).mean(), discriminator) as scaled:
            scaled.backward()
        loss = (real(fake(X).detach()).float() - 1).pow(2).mean()
        with amp.scale_loss(loss, generator if cure is None else optimizers, loss_id=1) as scaled:
            scaled.backward()
        discriminator.step()


def features_that_a_product_casts_to_nothing(cure):
    """Attention whose features are small: casts of functions make them 0."""

    def attend(y):
        features = torch.exp(y.float() - 18)
        weights = torch.einsum("sf,tf->st", features, features)
        return weights / weights.sum(1, keepdim=True)

    if cure is not None:
        eval(cure[1])
    train(Layers(after=attend), "O1", lambda m: m(X)[:, 0].mean())


def root_over_what_a_cast_makes_0(cure):
    def norms(y):
        features = torch.exp(y.float() - 18)
        squares = torch.einsum("sf,tf->st", features, features).float().sum(1)
        return (squares if cure is None else squares.clamp_min(float(cure[2]))).sqrt()

    if cure is not None:
        eval(cure[1])
    train(Layers(after=norms), "O1", lambda m: m(X).mean() * 1e6)


def counts_that_an_exponential_gives(cure):
    """A Poisson regression, whose rates half does not hold; the loss is outside of the model."""

    def rate(y):
        y = y + 11.5
        return (y if cure is None else y.float()).exp()

    train(Layers(after=rate), "O2", lambda m: F.poisson_nll_loss(m(X).float(), torch.full((16, 4), 1e5), False) * 1e-5)


def root_of_a_negative(cure):
    """The transfer curve of sRGB: torch.where takes the other branch, but not the gradient of that alone."""

    def loss(model):
        y = model(X).float()
        curve = 1.055 * (y if cure is None else y.clamp_min(float(cure[1]))) ** (1 / 2.4) - 0.055
        return torch.where(y <= 0.0031308, 12.92 * y, curve).pow(2).mean()

    train(Layers(), "O2", loss)


def division_by_a_root(cure):
    """Weight norm of a layer that begins at 0: the gradient of the root comes next."""

    def loss(model):
        add = 0.0 if cure is None else float(cure[1])
        y = model(X).float() * 0
        return (y / (y.pow(2).sum(1, keepdim=True) + add).sqrt() + model(X).float()).pow(2).mean()

    train(Layers(), "O1", loss)


def variance_of_a_damaged_checkpoint(cure):
    norm = nn.BatchNorm1d(4).eval()
    if cure is None:
        norm.running_var[1] = -1.0
    train(Layers(after=norm), "O1")


def log_of_softmax(cure):
    def loss(model):
        y = model(X).float() * 1e3
        log = torch.log(torch.softmax(y, -1)) if cure is None else F.log_softmax(y, -1)
        return F.nll_loss(log, Y)

    train(Layers(), "O1", loss)


def target_without_alignment(cure):
    """Four frames cannot spell six labels."""
    criterion = nn.CTCLoss(zero_infinity=cure is not None)
    labels, lengths = torch.ones(1, 6, dtype=torch.long), (torch.tensor([4]), torch.tensor([6]))

    def loss(model):
        return criterion(model(X[:4]).float().log_softmax(-1)[:, None], labels, *lengths)

    train(Layers(), "O1", loss)


def log_of_one_less_one(cure):
    """The probability is 1 in half."""

    def loss(model):
        p = torch.tanh(model(X) * 1e3).abs().half()
        survival = torch.log1p(-p if cure is None else (-p).float().clamp_min(eval(cure[1])))
        return (survival.float() * (Y[:, None] > 1)).mean()

    train(Layers(), "O1", loss)


def focal(cure):
    """Of log(1 - softmax(x)) there is no other form."""

    def loss(model):
        logits = model(X).float() * 1e3
        p, one_hot = torch.softmax(logits, -1), F.one_hot(Y, 4)
        if cure is None:
            log_p, log_rest = torch.log(p), torch.log(1 - p)
        else:
            log_p, log_rest = F.log_softmax(logits, -1), (1 - p).float().clamp_min(float(cure[1])).log()
        return -(one_hot * (1 - p) ** 2 * log_p + (1 - one_hot) * p**2 * log_rest).mean()

    train(Layers(), "O1", loss)


def log_of_zero(cure):
    def loss(model):
        p = torch.relu(model(X).float())
        return -torch.log(p if cure is None else p.clamp_min(float(cure[1]))).mean()

    train(Layers(), "O1", loss)


def adams_eps(cure):
    eps = 1e-8 if cure is None else float(cure[1])
    train(nn.Linear(8, 4), "O3", lambda m: m(X)[:, :2].float().mean(), lambda p: torch.optim.Adam(p, lr=1e-3, eps=eps))


def layer_beyond_float16(cure):
    model = Layers(lambda h: F.relu(h) * 20, nn.LayerNorm(4))
    with torch.no_grad():
        model.second.weight.normal_(0, 1e4)
    train(model, "O1", **({} if cure is None else {"keep_fp32": cure[1]}))


def layers_beyond_float16(cure):
    """The result of the second is beyond half, so that the third cannot take it: both are named."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4), nn.LayerNorm(4))
    with torch.no_grad():
        model[0].weight.normal_(0, 100.0)
        model[2].weight.normal_(0, 100.0)
    train(model, "O1", **({} if cure is None else {"keep_fp32": eval(cure[1])}))


def gradients_edited_at_o2(cure):
    """Those of the model are scaled, and the masters are stepped with others."""
    model = Layers(F.relu)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=50.0), opt_level="O2", loss_scale="dynamic", verbosity=0
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        with amp.scale_loss(cross_entropy(model) * 100, optimizer) as scaled:
            scaled.backward()
        for param in model.parameters() if cure is None else amp.master_params(optimizer):
            param.grad.mul_(1e-5)
        optimizer.step()


def squares(cure):
    def mean_square(y):
        return (y * 1000 if cure is None else (y * 1000).float()).pow(2).mean(-1)

    train(Layers(after=mean_square), "O2", lambda m: m(X).float().mean() * 1e-6)


CURES = {
    static_scale: r"loss_scale='(dynamic)'",
    scale_that_cannot_come_down: r"no min_loss_scale, or one far below 1048576: this gradient needs \d+,",
    half_too_early: r"cast it where it is small again: half\(\) after what makes it smaller; here it reaches",
    vae_in_half: r"\.float\(\) on what goes into exp, and \.half\(\) on what comes of it",
    softmax_by_hand: r"exp\((x - x\.amax\(dim, keepdim=True\))\) in place of exp\(x\)",
    exponential_that_float32_just_holds: r"\.clamp\(max=(\d+)\) on what goes into exp: it reaches 6\S+, and float16",
    vae_far_beyond_half: r"\.clamp\(max=(\d+)\) on what goes into exp: it reaches 3\d\S*, and float16 ends",
    exponential_behind_a_layer: r"\.clamp\(max=(\d+)\) on what goes into exp in \S+\.py:\d+, best where that is made",
    log_of_one_less_one: r"the logarithm of 1 - 1 \(or of less\): \.float\(\)\.clamp_min\((.*)\) on what goes",
    focal: r"F\.log_softmax\(x, dim\) in .* \.float\(\)\.clamp_min\((\S+)\) on what goes into the other logarithms",
    batch_without_positives: r"\.clamp_min\((\d)\) on the denominator",
    scores_in_half: r"keep_fp32=\['(attention)'\]",
    several_lines_beyond_float16: r"keep_fp32=\['(attention)'\]",
    optimizer_that_divides_by_a_norm: r"look at what the optimizer divides by, such as the norm of a gradient",
    inverse_root_of_zero: r"add an eps inside, as in torch\.rsqrt\(\.\.\. \+ (\S+)\)",
    temperature: r"\.clamp\(max=(\S+)\) on what goes into exp: .* as in CLIP",
    empty_selection: r"smooth_l1_loss of nothing is NaN: .* or sum and divide by max\(count, 1\)",
    end_of_range: r"\.clamp\((\S+), (\S+)\) on what goes into it",
    end_of_range_in_the_forward: r"atanh at the end of its domain, or outside, is .*: \.clamp\((\S+), (\S+)\) on",
    hyperbolic_distance_of_nothing: r"outside, is not finite: \.clamp_min\((\S+)\) on what goes into it",
    square_that_underflows_under_a_division: r"to which mul has underflowed in float16: \.float\(\) on what goes",
    padding_that_is_normalized: r"eps=(\S+) in normalize in \S+\.py:\d+, where 1e-12 is usual",
    gradient_of_a_saturated_logarithm: r"\.clamp_min\((\S+)\) on what goes into log in \S+\.py:\d+: the gradient",
    number_of_zero: r"a division by the number 0: .* such as a count that nothing has counted",
    variance_below_zero: r"a root of a negative number is NaN: \.clamp_min\((\S+)\) on what goes into it",
    count_of_zero: r"\.clamp_min\((\d)\) on the denominator",
    layers_that_grow: r"AMPCOMPAT_DTYPE=bfloat16 \(or opt_level='(O4)'/'O5'\)",
    vae_beyond_float32: r"\.clamp\(max=(\d+)\) on what goes into it",
    optimizer_that_amp_does_not_know: r"give amp\.initialize each optimizer that steps the model, and scale_loss",
    mask: r"write (\S+) in place of it",
    mask_as_a_tensor: r"write (\S+) in place of it",
    constant_as_a_tensor: r"a smaller number than 1e\+10: float16 ends at 65504",
    mask_in_a_buffer: r"write (\S+) in place of its least number",
    sum_in_a_buffer: r"keep_fp32=\['(norm)'\]",
    infinite_mask: r"write (\S+) in place of -inf",
    eps: r"use an eps of (\S+) or more",
    target_beyond_one: r"a loss that has a least value: this one fell to -\d\S+, as with targets outside of \[0, 1\]",
    zero_norm: r"add an eps to the denominator, as in / \(\.\.\. \+ (\S+)\)",
    root_of_zero: r"the gradient of sqrt at 0 is not finite: \.clamp_min\((\S+)\) on what goes into it",
    exponentials_that_are_divided_by_their_sum: r"exp\((x - x\.amax\(dim, keepdim=True\))\) in place of exp\(x\)",
    root_of_squares_of_which_some_underflow: r"mul has underflowed in float16: .* and \.clamp_min\((\S+)\) on",
    logarithm_of_a_bound_that_is_one_in_half: r"0\.9999 is 1 in float16: (\.float\(\)) on what goes into clamp in \S+$",
    end_of_a_domain_that_is_one_in_half: r"(0\.9{6} is 1|-0\.9{6} is -1) in float16: .* into clamp, and \.half\(\) on",
    log_of_a_bound_in_float32: r"of its domain, or outside, is not finite: \.clamp\((\S+), (\S+)\) on what",
    log_of_a_bound_that_is_one_in_float32: r"hint +the logarithm of 0 \(or of less\): \.clamp_min\((\S+)\) on what",
    root_of_rows_that_a_mask_leaves_nothing_of: r"of sqrt at 0 is not finite: \.clamp_min\((\S+)\) on what goes",
    gradients_that_the_block_of_another_optimizer_adds: r"(scale_loss)\(loss, \[optimizer_a, optimizer_b\]\)",
    features_that_a_product_casts_to_nothing: r"in its cast: (amp\.register_float_function\(torch, 'einsum'\)) before",
    root_over_what_a_cast_makes_0: r"in its cast: (amp\.\S+\(torch, 'einsum'\)) before .* and \.clamp_min\((\S+)\) on",
    counts_that_an_exponential_gives: r"the loss in float32: (\.float\(\)) on what the layers returned, before .* exp",
    root_of_squares_that_underflow: r"pow has underflowed in float16: .* and \.clamp_min\((\S+)\) on",
    root_of_a_negative: r"a root of a negative number is NaN: \.clamp_min\((\S+)\) on what goes into it",
    division_by_a_root: r"add an eps under the root, as in / \(\.\.\. \+ (\S+)\)\.sqrt\(\)",
    variance_of_a_damaged_checkpoint: r"running_var of this module is below 0",
    log_of_softmax: r"F\.log_softmax\(x, dim\) in place of log\(softmax\(x\)\)",
    target_without_alignment: r"zero_infinity=True",
    log_of_zero: r"\.clamp_min\((\S+)\) on what goes into it",
    adams_eps: r"pass eps=(\S+) to Adam",
    layer_beyond_float16: r"keep_fp32=\['(\S+)'\]",
    layers_beyond_float16: r"keep_fp32=(\['2', '4'\])",
    gradients_edited_at_o2: r"clip or scale the gradients of amp\.master_params\(optimizer\)",
    loop_that_grows: r"bound what goes round in this loop, by torch\.(\w+), .* from \S+ to \S+ in \d+ of them",
    op_and_layer_beyond_float16: r"keep_fp32=\['(cubes)'\]",
    op_and_layer_beyond_float16_at_o2: r"AMPCOMPAT_DTYPE=bfloat16 \(or opt_level='O4'/'(O5)'\)",
    divergence_from_a_target_of_zero: r"the gradient of kl_div to a target of 0 .*: \.(\w+)\(\) the target",
    size_of_a_box: r"\.clamp\(max=(\d+)\) on what goes into exp",
    log_of_softmax_that_is_not_masked: r"F\.log_softmax\(x, dim\) in place of log\(softmax\(x\)\)",
    targets_that_are_large: r"the loss in float32: \.float\(\) on what the model returned, before it goes into mul",
    similarities: r"`with amp\.disable_casts\(\):` around it, and \.float\(\) on what the model returned",
    resolution_in_half: r"hint +compute it in float32: \.float\(\) on what goes into mul$",
    ratio_to_a_root: r"add an eps under the root, as in / \(\.\.\. \+ (\S+)\)\.sqrt\(\)",
    gradient_of_a_logarithm_before_the_loss: r"\.clamp_min\((\S+)\) on what goes into log in \S+\.py:\d+: the gradient",
    gradient_of_a_logarithm: r"eps=1e-08 is 0 in float16, .*: use an eps of (\S+) or more",
    probabilities_that_are_masked: r"a mask of -inf makes 0: \.clamp_min\((\S+)\) on what goes into it",
    two_logarithms: r"F\.logsigmoid\(x\) in place of log\(sigmoid\(x\)\), F\.logsigmoid\(-x\) in place of",
    ratio_of_probabilities: r"\.clamp\(max=(\d+)\) on what goes into exp, where it reaches 1\S+: the gradient",
    gradient_of_a_small_root: r"\.float\(\) on what goes into rsqrt, and \.half\(\) on what comes of it before",
    squares: r"\.float\(\) on what the layers returned, before it goes into pow",
}


def explained(script, cure):
    """What is explained of a run, and its verdict."""
    torch.manual_seed(0)
    explain_overflows()
    script(cure)
    *held, verdict = last_words()
    for message in held:
        message.emit(as_json=False)
    reset()
    return verdict


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:Gradients of the model's half parameters changed:UserWarning")
@pytest.mark.filterwarnings("ignore:SGD.step\\(\\) with gradients that a scale_loss block has left:UserWarning")
@pytest.mark.filterwarnings("ignore:optimizer.step\\(\\) with gradients that a scale_loss block of another:UserWarning")
@pytest.mark.parametrize("script", CURES, ids=lambda script: script.__name__)
def test_the_first_hint_works(script, capsys):
    verdict = explained(script, None)
    text = capsys.readouterr().err
    first = next((line for line in text.splitlines() if line.startswith("  hint ")), text)
    cure = re.search(CURES[script], first)
    assert cure, first
    verdict = explained(script, cure)
    assert "ampcompat explain" not in capsys.readouterr().err
    assert verdict.content["causes"] == []
    assert verdict.content["not_finite"] == 0
    assert verdict.content["skipped"] <= STEPS / 2, verdict.head
