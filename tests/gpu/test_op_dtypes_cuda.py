"""Every recorded row on a CUDA device."""

import pytest
import torch
from o1_casts import casts_on
from op_calls import PAIRS, probe
from op_rows import ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

#: An emulated device computes with the CPU's kernels.
WITHOUT_A_CPU_KERNEL = {"F.ctc_loss", "nn.GRUCell", "nn.LSTMCell", "GRU", "LSTM"}


def kernel_of(name):
    is_missing = torch.version.cuda == "emulated" and name in WITHOUT_A_CPU_KERNEL
    return pytest.mark.skipif(is_missing, reason="an emulated device has no kernel of it")


@pytest.mark.parametrize("name", [pytest.param(name, marks=kernel_of(name)) for name in sorted(ROWS)])
def test_every_row_has_the_dtype_of_the_lists_on_cuda(name):
    with casts_on("cuda"):
        assert {pair: probe(name, pair, "cuda:0") for pair in PAIRS} == ROWS[name]["expected"]


@pytest.mark.parametrize(
    "layer", [pytest.param(getattr(torch.nn, name), marks=kernel_of(name)) for name in ("LSTM", "GRU", "RNN")]
)
def test_recurrent_layers_train_in_half(layer):
    net = layer(8, 6, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(5, 3, 8, device="cuda")
    with casts_on("cuda"):
        y = net(x)[0]
    assert y.dtype is torch.float16
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in net.parameters())
