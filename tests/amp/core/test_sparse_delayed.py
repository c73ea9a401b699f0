"""Sparse gradients of embeddings, accumulated: the CPU itself adds no half sparse tensors."""

import pytest
import torch
from torch import nn

from ampcompat.amp import initialize, master_params, scale_loss


# O2 with a delay needs torch to add half sparse tensors: it does on CUDA.
@pytest.mark.parametrize(("level", "delay"), [("O0", False), ("O0", True), ("O1", False), ("O1", True), ("O2", False)])
def test_two_blocks_and_a_step(level, delay):
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    before = model.state_dict()["weight"].clone()
    for last in (False, True):
        loss = model(torch.tensor([1, 1, 4])).float().sum() / 4
        with scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
            scaled.backward()
    (grad,) = [p.grad.to_dense().float() for p in master_params(optimizer)]
    want = torch.zeros(6, 3)
    want[1], want[4] = 1.0, 0.5
    assert torch.equal(grad, want)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], before - 0.5 * want)
