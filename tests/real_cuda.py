"""What a real CUDA device does otherwise than the CPU, and than an emulated one, whose kernels are the CPU's."""

import torch


def on_real_cuda() -> bool:
    """Whether the tensors of the test are made on a real CUDA device, whose kernels round in their own way."""
    return torch.get_default_device().type == "cuda" and torch.version.cuda != "emulated"


def assert_equal_but_for_rounding(found, wanted, share, where=None):
    """Bitwise; on a real CUDA device no element is off by more than ``share`` of the largest."""
    if not on_real_cuda() or not share:
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), where
        return
    largest = float(wanted.detach().float().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=share * largest)
