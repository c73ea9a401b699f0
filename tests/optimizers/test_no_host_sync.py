"""A step on the GPU asks the host nothing: reading a fake tensor's value, or mixing devices, raises."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ampcompat import _torch
from ampcompat.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from ampcompat.parallel.LARC import LARC

pytestmark = [pytest.mark.device, pytest.mark.torch]

MAKERS = {
    "FusedAdam": lambda params: FusedAdam(params, weight_decay=0.1, max_grad_norm=1.0),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
    "FusedLAMB": FusedLAMB,
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16),
    "FusedNovoGrad": FusedNovoGrad,
    "FusedAdagrad": FusedAdagrad,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_step_with_found_inf(maker, dtype, monkeypatch):
    # The fused kernels have no fake counterpart on 2.4; they are torch's own.
    monkeypatch.setattr(_torch, "has_fused_kernels", lambda device: False)
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.randn(4, 3, device="cuda:0", dtype=dtype)) for _ in range(2)]
        optimizer = maker(params)
        for scaled in (False, True, True):
            for p in params:
                p.grad = torch.randn(4, 3, device="cuda:0", dtype=dtype)
            if scaled:
                optimizer.found_inf = torch.zeros((), device="cuda:0")
                optimizer.grad_scale = torch.ones((), device="cuda:0")
            optimizer.step()


def test_larc():
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.randn(4))
        p.grad = torch.randn(4)
        LARC(torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)).step()


def test_the_check_would_notice():
    with FakeTensorMode(), pytest.raises(Exception, match="item|_local_scalar_dense"):
        torch.zeros((), device="cuda:0").item()
