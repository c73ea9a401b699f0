"""The lists and the CPU's convolutions as a script meets them: through ``amp.initialize``."""

import pytest
import torch
import torch.nn.functional as F
from o1_casts import here
from op_calls import PAIRS, probe
from op_rows import ROWS
from torch import nn

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]


def initialize(net, level="O1", **keywords):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **keywords)


def test_every_recorded_row_in_a_script_at_o1():
    _held = initialize(nn.Linear(2, 2))
    got = {name: {pair: probe(name, pair, here()) for pair in PAIRS} for name in ROWS}
    assert got == {name: row["expected"] for name, row in ROWS.items()}


@pytest.mark.on_cpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_convolutions_on_the_cpu_compute_in_float32_at_every_level(level, monkeypatch):
    # as on a processor without half-precision arithmetic, whatever this one has
    monkeypatch.setattr("ampcompat._torch.halves_without_cpu_convolution", lambda: frozenset([torch.float16]))
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, bias=False)
    x = torch.randn(2, 3, 6, 6)
    rounded = net.weight.detach().half().float().requires_grad_()
    want = F.conv2d(x.half().float(), rounded)
    net, optimizer = initialize(net, level, loss_scale=1.0)
    y = net(x)
    assert torch.equal(y.float(), want.half().float())
    with amp.scale_loss(y.float().sum(), optimizer) as loss:
        loss.backward()
    (gradient,) = torch.autograd.grad(want.sum(), rounded)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.float(), gradient.half().float())


def test_a_level_without_casts_ends_the_rules_effect():
    h = torch.ones(4).half()
    _held = initialize(nn.Linear(2, 2))
    assert torch.exp(h).dtype is h.cpu().dtype is torch.float32
    _held = initialize(nn.Linear(2, 2), "O0")
    assert torch.exp(h).dtype is h.cpu().dtype is torch.float16
