"""An op gets its cast however it is reached, and only where casts are on."""

import threading

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on
from torch import exp as early_exp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv2d as early_conv2d
from torch.nn.functional import cross_entropy as early_cross_entropy
from torch.nn.functional import layer_norm as early_layer_norm
from torch.nn.functional import linear as early_linear
from torch.nn.functional import softmax as early_softmax
from torch.utils._python_dispatch import TorchDispatchMode

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def h():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).half()


def test_functions_bound_before_the_rules(h):
    with casts_on():
        assert early_softmax(h, 1).dtype is FLOAT
        assert early_exp(h).dtype is FLOAT
        assert early_layer_norm(h, (8,)).dtype is FLOAT
        assert early_cross_entropy(h, torch.arange(4)).dtype is FLOAT
        assert early_linear(h.float(), torch.ones(2, 8)).dtype is HALF
        assert early_conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)).dtype is HALF


def test_methods_operators_and_aliases(h):
    x = h.float()
    with casts_on():
        assert h.softmax(1).dtype is h.exp().dtype is (h**2).dtype is (2**h).dtype is FLOAT
        assert h.sum().dtype is h.std().dtype is h.var(0).dtype is h.norm().dtype is FLOAT
        assert all(torch.norm(h, p=p).dtype is FLOAT for p in ("fro", "nuc", 1, float("inf")))
        assert (x @ x.t()).dtype is x.mv(x[0]).dtype is torch.inner(x, x).dtype is HALF
        assert torch.special.expm1(h).dtype is torch.special.log_softmax(h, 1).dtype is FLOAT
        assert torch.arccos(h.clamp(-0.9, 0.9)).dtype is FLOAT


@pytest.mark.skipif(not hasattr(torch.ops.aten.mm, "dtype"), reason="this torch's mm takes no out_dtype")
def test_a_product_with_out_dtype_gets_its_arguments_in_half():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.mm.dtype:
                seen.extend(x.dtype for x in args[:2])
            return op(*args, **kwargs or {})

    seen = []
    with casts_on("cuda"), FakeTensorMode(), Seen():
        x = torch.ones(16, 16, device="cuda")
        assert torch.mm(x, x, out_dtype=FLOAT).dtype is FLOAT
    assert seen == [HALF, HALF]


def test_modules(h):
    with casts_on():
        for module in (torch.nn.Softmax(1), torch.nn.GELU(), torch.nn.Softplus(), torch.nn.LayerNorm(8)):
            assert module(h).dtype is FLOAT
        assert torch.nn.Upsample(scale_factor=2)(h[None]).dtype is FLOAT
        assert torch.nn.Bilinear(8, 8, 2)(h, h.float()).dtype is FLOAT
        assert torch.nn.PReLU()(h.float()).dtype is HALF
        assert torch.nn.Conv1d(4, 2, 3)(h.float()[None]).dtype is HALF


def test_float32_arithmetic_on_half_values_is_bitwise_float32s(h):
    with casts_on():
        for name in ("exp", "sum", "std", "var", "norm", "cosh"):
            assert torch.equal(getattr(torch, name)(h), getattr(torch, name)(h.float())), name
        assert torch.equal(F.gelu(h), F.gelu(h.float()))
        assert torch.equal(F.cosine_similarity(h, -h), F.cosine_similarity(h.float(), -h.float()))


def test_nothing_but_floats_of_the_castable_dtypes_is_cast(h):
    d = h.double()
    with casts_on():
        assert torch.exp(d).dtype is d.sum().dtype is torch.mv(d, d[0]).dtype is torch.dot(d[0], d[0]).dtype is d.dtype
        assert torch.arange(4).sum().dtype is torch.int64
        assert torch.exp(torch.complex(d, d)).dtype is torch.complex128


def test_half_is_bfloat16_where_autocast_says_so(h):
    x = h.float()
    with casts_on(dtype=torch.bfloat16):
        assert torch.mv(x, x[0]).dtype is torch.nn.LSTMCell(8, 8)(x)[0].dtype is torch.bfloat16
        assert torch.exp(h.bfloat16()).dtype is torch.exp(h).dtype is FLOAT
        assert torch.dot(h[0], h.bfloat16()[0]).dtype is FLOAT  # neither half dtype holds the other
        with pytest.raises(NotImplementedError, match="bfloat16"):
            h.bfloat16().exp_()


def test_users_own_regions_and_threads_decide(h):
    seen = []
    with casts_on():
        with torch.autocast("cpu", enabled=False):
            assert torch.exp(h).dtype is HALF
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.mv(h.float(), h.float()[0]).dtype is torch.bfloat16
        thread = threading.Thread(target=lambda: seen.append(torch.exp(h).dtype))
        thread.start()
        thread.join()
    assert seen == [HALF]  # a new thread starts with autocast off


def test_rules_of_one_device_leave_the_others_alone(h):
    with casts_on("cuda"):
        assert torch.exp(h).dtype is h.cpu().dtype is HALF


def test_mixed_dtypes_in_ops_on_no_list(h):
    x = h.float()
    with casts_on():
        assert torch.einsum("ij,kj->ik", x, h).dtype is HALF
        assert F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype is HALF
        assert F.embedding(torch.arange(4), x).dtype is FLOAT
        assert torch.where(x > 0, x, h).dtype is FLOAT
        assert torch.cat([x, h]).dtype is torch.stack([h, x]).dtype is FLOAT
        index = torch.arange(4)
        # index_add and scatter demand one dtype, as they do without autocast and did under apex
        assert torch.zeros(4, 8).index_add(0, index, (x @ x.t() @ x).float()).dtype is FLOAT
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            torch.zeros(4, 8).index_add(0, index, h)
        with pytest.raises(RuntimeError, match="dtype"):
            torch.zeros(4, 8).scatter(0, index.view(4, 1), h)


def test_in_place_forms_keep_storage_and_dtype_of_the_left_side(h):
    with casts_on():
        for name in ("add_", "mul_", "sub_", "div_"):
            left = h.clone()
            assert getattr(left, name)(h.float()) is left
            assert left.dtype is HALF
        for left in (h[:, :4].clone(), h[:, :4].float()):
            dtype = left.dtype
            assert left.addmm_(h.float(), h.t()).dtype is dtype
            assert torch.isfinite(left).all()


def test_cpu_returns_float32_where_casts_are_on(h):
    plain = torch.Tensor.cpu
    with casts_on():
        assert h.cpu().dtype is FLOAT
        assert torch.equal(h.cpu(), h.float())
        assert h.long().cpu().dtype is torch.int64
        with torch.autocast("cpu", enabled=False):
            assert h.cpu().dtype is HALF
    assert torch.Tensor.cpu is plain
    assert "cpu" not in torch.Tensor.__dict__
    assert h.cpu().dtype is HALF


def test_python_functions_of_the_float_list_compute_in_float32():
    x = torch.full((1, 4, 8), 300.0).half()  # its square is beyond the largest half
    with casts_on():
        assert torch.equal(torch.nn.LocalResponseNorm(2)(x), F.local_response_norm(x.float(), 2))
        assert torch.isfinite(F.gaussian_nll_loss(x, -x, torch.ones_like(x)))
        assert F.interpolate(x, 4, mode="area").dtype is FLOAT
        y = (x / 100).half()
        assert torch.equal(
            F.multilabel_soft_margin_loss(y, torch.ones_like(y)),
            F.multilabel_soft_margin_loss(y.float(), torch.ones_like(y).float()),
        )


def test_ops_that_torch_makes_of_in_place_steps():
    """torch computes logsumexp by an in-place exp, and matrix_exp by writing into slices: no listed op of theirs."""
    half = torch.ones(2, 2, dtype=torch.float16)
    with casts_on():
        assert torch.logsumexp(half, 0).dtype == torch.float16
        assert torch.matrix_exp(half).dtype == torch.float16


def test_a_half_result_that_the_caller_asks_for():
    half = torch.ones(2, 2, dtype=torch.float16)
    with casts_on():
        assert torch.linalg.vector_norm(half, dtype=torch.float16).dtype == torch.float16
        assert torch.sum(half, dtype=torch.float16).dtype == torch.float16
        assert torch.sum(half).dtype == torch.float32
