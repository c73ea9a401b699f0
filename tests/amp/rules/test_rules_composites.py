"""Every function of the float list, on half arguments at O1, has the values and gradients of float32 throughout.

Bitwise: the arguments are cast once, as a whole, and torch runs the same float32 kernels. A function whose inner ops
were cast one by one would round between them, or add up two half gradients that cancel (``normalize``).
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on, engine_without_casts
from real_cuda import assert_equal_but_for_rounding
from seeded import seeded

from ampcompat.amp.casts.rules import SHIPPED, Rule

pytestmark = [pytest.mark.device, pytest.mark.torch]

# Far below 1, where squares vanish in half; far above, where they overflow.
MAGNITUDES = [1e-4, 1e-2, 1.0, 100.0, 3e4]
SHAPES = [(4, 8), (3, 16, 5), (2, 64, 4, 4)]


def signs(shape):
    return torch.where(torch.rand(shape) > 0.5, 1.0, -1.0)


def ctc(a):
    logs = F.log_softmax(flat(a)[:, None, :4], 2).repeat(3, 2, 1)
    length, batch = logs.shape[:2]
    return F.ctc_loss(logs, torch.ones(batch, 2, dtype=torch.long), (length,) * batch, (2,) * batch)


def multilabel_margin(a):
    labels = torch.stack([torch.randperm(a.shape[1]) for _ in range(a.shape[0])])
    return F.multilabel_margin_loss(a, labels)


def classes(a):
    return torch.randint(0, a.shape[1], (a.shape[0], *a.shape[2:]))


def flat(a):
    return a.flatten(1)


#: name -> [function of scaled tensors, ...]; their parameters are tensors of one shape: x, y and z scaled by the
#: magnitude, p and q in (0, 1).
CALLS = {
    "acos": [lambda p: p.acos()],
    "asin": [lambda p: p.asin()],
    "cosh": [lambda x: x.cosh()],
    "erfinv": [lambda p: p.erfinv()],
    "exp": [lambda x: x.exp()],
    "expm1": [lambda x: x.expm1()],
    "log": [lambda p: p.log()],
    "log10": [lambda p: p.log10()],
    "log2": [lambda p: p.log2()],
    "reciprocal": [lambda x: x.reciprocal()],
    "rsqrt": [lambda p: p.rsqrt()],
    "sinh": [lambda x: x.sinh()],
    "tan": [lambda x: x.tan()],
    "pow": [lambda x: x**2, lambda p, y: p**y, lambda x: 2**x],
    "cumprod": [lambda x: x.cumprod(1)],
    "cumsum": [lambda x: x.cumsum(1)],
    "dist": [lambda x, y: torch.dist(x, y)],
    "norm": [
        lambda x: x.norm(),
        lambda x: torch.norm(x, 1, dim=1),
        lambda x: torch.norm(x, 3, dim=1, keepdim=True),
        lambda x: torch.norm(x, "fro", dim=(0, 1)),
        lambda x: torch.norm(flat(x), "nuc"),
        lambda x: torch.linalg.norm(x, dim=1),
        lambda x: torch.linalg.matrix_norm(flat(x)),
    ],
    "prod": [lambda x: x.prod(1), lambda x: x.prod()],
    "std": [lambda x: x.std(1), lambda x: x.std()],
    "sum": [lambda x: x.sum(), lambda x: x.sum(1)],
    "var": [lambda x: x.var(), lambda x: x.var(dim=1, unbiased=False)],
    "renorm": [lambda x: x.renorm(2, 0, 1.0)],
    "softmax": [lambda x: F.softmax(x, 1)],
    "log_softmax": [lambda x: F.log_softmax(x, 1)],
    "softmin": [lambda x: F.softmin(x, 1)],
    "softplus": [lambda x: F.softplus(x)],
    "gelu": [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")],
    "layer_norm": [
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x, p, q: F.layer_norm(x, x.shape[1:], p[0], q[0]),
    ],
    "group_norm": [lambda x, p, q: F.group_norm(x, 2, flat(p)[0, : x.shape[1]], flat(q)[0, : x.shape[1]])],
    "local_response_norm": [lambda x: F.local_response_norm(x[..., None], 3, alpha=0.01)],
    "normalize": [
        lambda x: F.normalize(x),
        lambda x: F.normalize(x, p=1.0, dim=-1),
        lambda x: F.normalize(x, p=3.0),
        lambda x: F.normalize(x, p=float("inf"), dim=0),
    ],
    "cosine_similarity": [lambda x, y: F.cosine_similarity(x, y)],
    "interpolate": [
        lambda x: F.interpolate(flat(x)[None], size=3, mode="area"),
        lambda x: F.interpolate(flat(x)[None], scale_factor=2),
        lambda x: F.interpolate(flat(x)[None], size=3, mode="nearest-exact"),
        lambda x: F.interpolate(flat(x)[None], size=5, mode="linear"),
        lambda x: F.interpolate(flat(x)[None, None], scale_factor=1.7, mode="bilinear"),
        lambda x: F.interpolate(flat(x)[None, None], size=3, mode="bicubic", antialias=True),
        lambda x: F.interpolate(flat(x)[None, None, None], size=(1, 3, 3), mode="trilinear"),
    ],
    "grid_sample": [
        lambda x, p: F.grid_sample(flat(x)[None, None], flat(p)[:, :6].reshape(1, -1, 3, 2), align_corners=False)
    ],
    "cosine_embedding_loss": [lambda x, y: F.cosine_embedding_loss(flat(x), flat(y), signs(x.shape[0]))],
    "cross_entropy": [
        lambda x: F.cross_entropy(x, classes(x)),
        lambda x, p: F.cross_entropy(x, classes(x), weight=flat(p)[0, : x.shape[1]].detach(), label_smoothing=0.1),
        lambda x, p: F.cross_entropy(x, p),
        lambda x, p: F.cross_entropy(x, p, label_smoothing=0.1, reduction="sum"),
    ],
    "ctc_loss": [lambda x: ctc(x)],
    "gaussian_nll_loss": [
        lambda x, y, p: F.gaussian_nll_loss(x, y, p),
        lambda x, y, p: F.gaussian_nll_loss(x, y, p, full=True, reduction="sum"),
    ],
    "hinge_embedding_loss": [lambda x: F.hinge_embedding_loss(x, signs(x.shape))],
    "huber_loss": [lambda x, y: F.huber_loss(x, y, delta=0.5), lambda x, y, p: weighted(F.huber_loss, x, y, p)],
    "kl_div": [
        lambda x, p: F.kl_div(x, p, reduction="batchmean"),
        lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True),
    ],
    "l1_loss": [lambda x, y: F.l1_loss(x, y), lambda x, y, p: weighted(F.l1_loss, x, y, p)],
    "margin_ranking_loss": [lambda x, y: F.margin_ranking_loss(x, y, signs(x.shape), margin=0.5)],
    "mse_loss": [
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        lambda x, y, p: weighted(F.mse_loss, x, y, p),
    ],
    "multi_margin_loss": [lambda x: F.multi_margin_loss(flat(x), torch.randint(0, x.shape[1], (x.shape[0],)))],
    "multilabel_margin_loss": [lambda x: multilabel_margin(flat(x))],
    "multilabel_soft_margin_loss": [lambda x, p: F.multilabel_soft_margin_loss(x, p.detach().round(), p.detach())],
    "nll_loss": [
        lambda x: F.nll_loss(x, classes(x)),
        lambda x, p: F.nll_loss(x, classes(x), weight=flat(p)[0, : x.shape[1]].detach()),
    ],
    "poisson_nll_loss": [
        lambda x, p: F.poisson_nll_loss(x, p),
        lambda p, y: F.poisson_nll_loss(p, y.abs(), log_input=False, full=True),
    ],
    "smooth_l1_loss": [lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), lambda x, y: F.smooth_l1_loss(x, y, beta=0.0)],
    "soft_margin_loss": [lambda x: F.soft_margin_loss(x, signs(x.shape))],
    "triplet_margin_loss": [lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True)],
    "triplet_margin_with_distance_loss": [
        lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z, swap=True),
        lambda x, y, z: F.triplet_margin_with_distance_loss(
            flat(x), flat(y), flat(z), distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
        ),
    ],
    "binary_cross_entropy_with_logits": [
        lambda x, p: F.binary_cross_entropy_with_logits(x, p),
        lambda x, p, q: F.binary_cross_entropy_with_logits(x, p, q.detach(), pos_weight=q.detach()),
    ],
    "cpu": [lambda x: x.cpu()],
}


#: CUDA sums their gradients in an order that differs from call to call (``torch.use_deterministic_algorithms``).
ADDED_IN_ANY_ORDER = {"interpolate", "grid_sample", "ctc_loss"}


def weighted(loss, x, y, weight):
    """torch took ``weight`` after 2.4."""
    return loss(x, y, weight=weight) if "weight" in inspect.signature(loss).parameters else loss(x, y)


def test_the_calls_are_the_float_list():
    assert set(CALLS) == {name for name, rule in SHIPPED.items() if rule is Rule.FLOAT}


def value_and_gradients(call, leaves, arguments, engine):
    torch.manual_seed(2)  # for labels and the like
    y = call(*arguments)
    slope = torch.randn(y.shape, generator=seeded(3)).to(y)
    with engine():
        gradients = torch.autograd.grad(y, leaves, slope, allow_unused=True)
    return [y.detach(), *[g for g in gradients if g is not None]]


def arguments_of(call, shape, magnitude):
    torch.manual_seed(1)
    names = inspect.signature(call).parameters
    made = [torch.rand(shape) * 0.98 + 0.01 if name in "pq" else torch.randn(shape) * magnitude for name in names]
    return [t.clamp(-6e4, 6e4).half() for t in made]


def third(name, part):
    """Return a third of the shapes and magnitudes: each of both for each function, all pairs among the functions."""
    turn = list(CALLS).index(name) + part
    return [(shape, MAGNITUDES[m]) for s, shape in enumerate(SHAPES) for m in range(5) if (s + m + turn) % 3 == 0]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
@pytest.mark.parametrize("name", CALLS)
def test_half_arguments_compute_as_float32(name, part):
    """Values and gradients equal those of the same call with float32 arguments."""
    cases = [(call, *case) for call in CALLS[name] for case in third(name, part)]
    wanted = []
    for call, *case in cases:
        half = [t.requires_grad_() for t in arguments_of(call, *case)]
        wanted.append(value_and_gradients(call, half, [t.float() for t in half], torch.enable_grad))
    with casts_on():
        for (call, *case), want in zip(cases, wanted, strict=True):
            half = [t.requires_grad_() for t in arguments_of(call, *case)]
            got = value_and_gradients(call, half, half, engine_without_casts)
            assert got[0].dtype is torch.float32
            share = torch.finfo(torch.float16).eps if name in ADDED_IN_ANY_ORDER else 0.0
            for a, b in zip(got, want, strict=True):
                where = (CALLS[name].index(call), *case)
                assert_equal_but_for_rounding(a.nan_to_num(7), b.nan_to_num(7), share, where)
