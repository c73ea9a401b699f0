"""Every recorded row on a CUDA device."""

import pytest
import torch
from o1_casts import casts_on
from op_calls import PAIRS, probe
from op_rows import ROWS

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_has_the_dtype_of_the_lists_on_cuda(name):
    with casts_on("cuda"):
        assert {pair: probe(name, pair, "cuda:0") for pair in PAIRS} == ROWS[name]["expected"]


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_train_in_half(layer):
    net = layer(8, 6, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(5, 3, 8, device="cuda")
    with casts_on("cuda"):
        y = net(x)[0]
    assert y.dtype is torch.float16
    y.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in net.parameters())
