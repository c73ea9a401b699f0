"""The emulated device refuses what CUDA refuses, although its kernels are the CPU's, which do it."""

import pytest
import torch
import torch.nn.functional as F
from emulated_cuda import Log

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]


def ones(*shape, dtype):
    return torch.ones(*shape, dtype=dtype, device="cuda")


def unscale(dtype):
    found_inf, inverse = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([ones(2, dtype=dtype)], found_inf, inverse)


REFUSED = {
    "unscaling bfloat16": lambda: unscale(torch.bfloat16),
    "a product of integers": lambda: ones(2, 2, dtype=torch.long) @ ones(2, 2, dtype=torch.long),
    "a linear layer of integers": lambda: F.linear(ones(2, 2, dtype=torch.int32), ones(2, 2, dtype=torch.int32)),
    "a convolution of integers": lambda: F.conv1d(ones(1, 1, 3, dtype=torch.long), ones(1, 1, 1, dtype=torch.long)),
    "max_pool2d of integers": lambda: F.max_pool2d(ones(1, 1, 2, 2, dtype=torch.long), 2),
    "avg_pool2d of integers": lambda: F.avg_pool2d(ones(1, 1, 2, 2, dtype=torch.long), 2),
    "interpolate of bytes": lambda: F.interpolate(ones(1, 1, 2, 2, dtype=torch.uint8), scale_factor=2, mode="bilinear"),
    "angle of half": lambda: ones(2, dtype=torch.half).angle(),
    "histc of half": lambda: ones(2, dtype=torch.half).histc(),
    "igamma of bfloat16": lambda: torch.igamma(ones(2, dtype=torch.bfloat16), ones(2, dtype=torch.bfloat16)),
    "histogram": lambda: torch.histogram(ones(2, dtype=torch.float32), 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_has_no_kernel_for(name):
    with pytest.raises(NotImplementedError, match=r"not implemented for '|Could not run 'aten::"):
        REFUSED[name]()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_it_has_one_for(dtype):
    unscale(dtype)
    assert (ones(2, 2, dtype=dtype) @ ones(2, 2, dtype=dtype)).sum() == 8


def test_lists_that_are_taken_tensor_by_tensor():
    def is_slow(call):
        with Log() as log:
            call()
        return log.of("kernel")[-1].is_slow

    halves, factor = [ones(4, 4, dtype=torch.bfloat16)] * 2, torch.full((), 0.5, device="cuda")
    spread = [ones(4, 4, dtype=torch.float32)[:, ::2]] * 2
    found_inf = torch.zeros((), device="cuda")
    assert is_slow(lambda: torch._foreach_mul_(halves, factor))
    assert not is_slow(lambda: torch._foreach_mul_(halves, factor.bfloat16()))
    assert is_slow(lambda: torch._amp_foreach_non_finite_check_and_unscale_(spread, found_inf, factor))
