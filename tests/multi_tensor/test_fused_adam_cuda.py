"""``fused_adam_cuda``: dtypes of the param and its copy, and refusals. ``tests/alias/test_alias.py`` tests its rule."""

import pytest
import torch

from ampcompat import fused_adam_cuda

pytestmark = pytest.mark.device

NUMBERS = (0.1, 0.9, 0.99, 1e-4, 4.0, 1, 1, 1, 0.1)
HALVES = [torch.float16, torch.bfloat16]


def made(dtype=torch.float32):
    torch.manual_seed(0)
    p, m, v, g = torch.randn(3, 2), torch.zeros(3, 2), torch.zeros(3, 2), torch.randn(3, 2)
    return p.to(dtype), m.to(dtype), v.to(dtype), g.to(dtype)


def none():
    return torch.tensor([])


@pytest.mark.parametrize("of_grads", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_param_is_computed_in_float32_and_rounded_once(dtype, of_grads):
    halves = made(dtype)
    wide = [tensor.float() for tensor in halves]
    p, m, v, g = halves
    fused_adam_cuda.adam(p, none(), m, v, g.to(of_grads), *NUMBERS)
    fused_adam_cuda.adam(wide[0], none(), wide[1], wide[2], g.to(of_grads).float(), *NUMBERS)
    for half, exact in zip((p, m, v), wide, strict=False):
        assert torch.equal(half, exact.to(dtype))


def test_float64():
    wide = [tensor.double() for tensor in made()]
    p, m, v, g = wide
    start = p.clone()
    fused_adam_cuda.adam(p, none(), m, v, g, *NUMBERS)
    first, second = 0.1 * g / 4, 0.01 * (g / 4) ** 2
    wanted = start - 0.1 * 0.01**0.5 / 0.1 * (first / (second.sqrt() + 1e-4) + 0.1 * start)
    torch.testing.assert_close(p, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_copy(dtype):
    """fairseq passes a float32 param as its own copy. The gradient stays."""
    p, m, v, g = made()
    before, copy = g.clone(), torch.empty(3, 2, dtype=dtype)
    fused_adam_cuda.adam(p, copy, m, v, g, *NUMBERS)
    assert torch.equal(copy, p.to(dtype))
    assert torch.equal(g, before)
    own, m, v, g = made()
    fused_adam_cuda.adam(own, own, m, v, g, *NUMBERS)
    assert torch.equal(own, p)


def test_arguments_in_another_order_are_refused_before_anything_changes():
    """The order of ampcompat's first releases had the copy after the moments."""
    p, m, v, g = made()
    before = [tensor.clone() for tensor in (p, m, v, g)]
    with pytest.raises(RuntimeError, match="fused_adam_cuda.adam got shapes .* at position 0 of its lists"):
        fused_adam_cuda.adam(p, m, v, none(), g, *NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip((p, m, v, g), before, strict=True))


def test_lists_that_are_not_parallel_are_refused():
    p, m, v, g = made()
    flag = torch.zeros(1, dtype=torch.int)
    with pytest.raises(RuntimeError, match=r"fused_adam_cuda.adam_mt got lists of \[1, 1, 1\] tensors: it takes 4"):
        fused_adam_cuda.adam_mt(2048, flag, [[p], [m], [v]], *NUMBERS)
    fused_adam_cuda.adam_mt(2048, flag, [[], [], [], []], *NUMBERS)
