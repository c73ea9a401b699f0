"""The rules under autograd, double backward, torch.func and inference mode."""

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on, engine_without_casts
from seeded import seeded

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=seeded(0))


def test_gradients_come_back_in_the_dtype_of_the_argument(x):
    for dtype in (HALF, FLOAT):
        a = x.to(dtype).requires_grad_()
        with casts_on():
            loss = F.log_softmax(a, 1).exp().sum() + torch.mv(a, a[0]).float().sum() + torch.dot(a[0], a[1].float())
            with engine_without_casts():
                loss.backward()
        assert a.grad.dtype is dtype


def test_double_backward_of_each_kind_of_rule():
    def run(a):
        return torch.mv(a, a[0]).sum() + a.exp().sum() + torch.cosine_similarity(a, a.flip(0)).sum()

    a = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    with casts_on():  # float64 is left alone, so finite differences hold
        assert torch.autograd.gradcheck(run, (a,))
        assert torch.autograd.gradgradcheck(run, (a,))


CALLS = {
    "exp": (torch.exp, FLOAT),
    "softmax": (lambda t: F.softmax(t, -1), FLOAT),
    "log_softmax": (lambda t: F.log_softmax(t, -1), FLOAT),
    "layer_norm": (lambda t: F.layer_norm(t, t.shape[-1:]), FLOAT),
    "gelu": (F.gelu, FLOAT),
    "sum": (lambda t: t.sum(-1), FLOAT),
    "std": (lambda t: t.std(-1), FLOAT),
    "norm": (lambda t: t.norm(dim=-1), FLOAT),
    "cross_entropy": (lambda t: F.cross_entropy(t, t.argmax(-1)), FLOAT),
    "mm": (lambda t: t.reshape(2, 4) @ t.reshape(4, 2), HALF),
    "mv": (lambda t: torch.mv(t.reshape(2, 4), t[:4]), HALF),
    "conv1d": (lambda t: F.conv1d(t.reshape(1, 1, 8), t[:3].reshape(1, 1, 3)), HALF),
    "cross": (lambda t: torch.linalg.cross(t[:3], t[3:6].float()), FLOAT),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_vmap_has_the_casts_of_a_plain_call(x, name):
    call, dtype = CALLS[name]
    batch = x.half() if dtype is FLOAT else x
    with casts_on():
        one_by_one = torch.stack([call(row) for row in batch])
        mapped = torch.func.vmap(call)(batch)
    assert mapped.dtype is one_by_one.dtype is dtype
    # batched kernels sum in another order, at times in half
    torch.testing.assert_close(mapped, one_by_one, atol=5e-3 if dtype is HALF else 1e-5, rtol=2e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # from inside torch.func.jvp
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jvp"])
def test_functional_transforms(x, transform):
    def loss(a):
        return (F.softmax(torch.mv(a, a[0]), 0) * torch.arange(4.0)).sum()

    with casts_on():
        if transform == "jvp":
            value, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
            assert value.dtype is tangent.dtype is FLOAT
        else:
            gradient = getattr(torch.func, transform)(loss)(x)
            assert gradient.dtype is FLOAT
            assert torch.isfinite(gradient).all()


def test_inference_mode_and_no_grad(x):
    cell = torch.nn.LSTMCell(8, 6)
    for region in (torch.inference_mode, torch.no_grad):
        with casts_on(), region():
            assert F.softmax(x.half(), 1).dtype is FLOAT
            assert cell(x)[0].dtype is HALF
            assert torch.nn.Conv1d(4, 2, 3)(x[None]).dtype is HALF


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_traced_graphs(x):
    with casts_on():
        traced = torch.jit.trace(lambda a: F.softmax(a, 1), (x.half(),))
        assert traced(x.half()).dtype is FLOAT
