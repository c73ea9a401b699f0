"""An op gets its cast however it is reached, and only where casts are on."""

import threading

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on, here
from seeded import seeded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def h():
    return torch.randn(4, 8, generator=seeded(0)).half()


def test_methods_operators_and_aliases(h):
    x = h.float()
    with casts_on():
        assert h.softmax(1).dtype is h.exp().dtype is (h**2).dtype is (2**h).dtype is FLOAT
        assert h.sum().dtype is h.std().dtype is h.var(0).dtype is h.norm().dtype is FLOAT
        assert all(torch.norm(h, p=p).dtype is FLOAT for p in ("fro", "nuc", 1, float("inf")))
        assert (x @ x.t()).dtype is x.mv(x[0]).dtype is HALF
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
        if here() == "cpu":  # torch refuses the two half dtypes together on other devices
            assert torch.dot(h[0], h.bfloat16()[0]).dtype is FLOAT  # neither holds the other
        with pytest.raises(NotImplementedError, match="bfloat16"):
            h.bfloat16().exp_()


def test_users_own_regions_and_threads_decide(h):
    seen = []
    with casts_on():
        with torch.autocast(here(), enabled=False):
            assert torch.exp(h).dtype is HALF
            with torch.autocast(here(), dtype=torch.bfloat16):
                assert torch.mv(h.float(), h.float()[0]).dtype is torch.bfloat16
        thread = threading.Thread(target=lambda: seen.append(torch.exp(h).dtype))
        thread.start()
        thread.join()
    assert seen == [HALF]  # a new thread starts with autocast off


def test_rules_of_one_device_leave_the_others_alone(h):
    with casts_on("cuda" if here() == "cpu" else "cpu"):
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
        assert torch.equal(h.cpu(), h.float().cpu())
        assert h.long().cpu().dtype is torch.int64
        with torch.autocast(here(), enabled=False):
            assert h.cpu().dtype is HALF
    assert torch.Tensor.cpu is plain
    assert "cpu" not in torch.Tensor.__dict__
    assert h.cpu().dtype is HALF


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
