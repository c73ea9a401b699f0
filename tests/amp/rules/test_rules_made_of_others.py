"""Ops that torch makes of others, where casts of these would not fit: they run whole, as in eager code."""

import pytest
import torch
import torch.nn.functional as F
from seeded import seeded
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from ampcompat.amp import initialize

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def casts():
    """Return a function that puts casts of O1 on, or of O4, as long as the model that it returns is alive."""
    return lambda level="O1": initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FLOAT])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("normed", [weight_norm, parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm(normed, dim, dtype, level, casts):
    """The magnitudes have the dtype of the weight, which torch demands of them."""
    _held = casts(level)
    layer = normed(nn.Linear(8, 4).to(dtype), dim=dim)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    y = layer(torch.randn(2, 8, dtype=dtype))
    assert layer.weight.dtype is dtype
    y.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {dtype}


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3)])
def test_pinv_has_float32s_result_and_gradient(shape, hermitian, casts):
    a = torch.randn(shape, generator=seeded(0))
    if hermitian:
        a = a @ a.mT
    found = []
    for cast in (False, True):
        if cast:
            _held = casts()
        given = a.clone().requires_grad_()
        result = torch.linalg.pinv(given, hermitian=hermitian)
        result.sum().backward()
        found.append((result.detach(), given.grad))
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


def test_pinverse_by_its_older_name(casts):
    a = torch.eye(3, requires_grad=True)
    _held = casts()
    torch.pinverse(a).sum().backward()
    assert a.grad.dtype is FLOAT


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("size", [(1, 1, 5, 7), (1, 1, 2, 3, 5)])
def test_affine_grid_computes_in_the_dtype_of_its_matrix(size, dtype, casts):
    """As under apex, to the bit: half positions of a picture of 224 pixels are a tenth of a pixel off."""
    theta = torch.randn(1, len(size) - 2, len(size) - 1, generator=seeded(0)).to(dtype)
    found = []
    for cast in (False, True):
        if cast:
            _held = casts()
        given = theta.clone().requires_grad_()
        grid = F.affine_grid(given, size, align_corners=False)
        grid.float().square().sum().backward()
        assert grid.dtype is dtype
        found.append((grid.detach(), given.grad))
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_complex_numbers_of_two_layers(level, casts):
    """torch makes no complex numbers of bfloat16 ones."""
    layer = casts(level)
    x = torch.ones(1, 2)
    z = torch.complex(layer(x), layer(x))
    assert z.dtype is (torch.complex32 if level == "O1" else torch.complex64)
    z.real.float().sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_complex_numbers_of_float32_and_float64(casts):
    _held = casts("O4")
    for dtype, made in ((FLOAT, torch.complex64), (torch.float64, torch.complex128)):
        x = torch.ones(2, dtype=dtype)
        assert torch.complex(x, x).dtype is made


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_safe_softmax"), reason="this torch has no _safe_softmax")
def test_the_softmax_of_masked_attention_is_float32(casts):
    x = torch.randn(2, 4, dtype=HALF, requires_grad=True)
    _held = casts()
    y = torch.ops.aten._safe_softmax(x, -1)
    y[:, 0].sum().backward()
    assert y.dtype is FLOAT
    assert x.grad.dtype is HALF


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_made_of_products(is_causal, dtype, casts):
    x = torch.randn(1, 4, 8, dtype=dtype, requires_grad=True)
    _held = casts()
    y, weights = torch.ops.aten._scaled_dot_product_attention_math(x, x, x, is_causal=is_causal)
    (y.sum() + weights.sum()).backward()
    assert x.grad.dtype is dtype
    assert torch.isfinite(x.grad).all()
