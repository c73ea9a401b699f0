"""Two optimizers over the same parameters, in one block: unscaled once."""

import pytest
import torch
from torch import nn

from ampcompat.amp import initialize, master_params, scale_loss


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_block_for_two_optimizers_that_share_parameters(level):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    model, optimizers = initialize(model, optimizers, opt_level=level, verbosity=0)
    with scale_loss(model(x).float().mean(), optimizers) as scaled:
        scaled.backward()
    once = [p.grad.clone() for p in master_params(optimizers[0])]
    assert 0.1 < once[0].abs().sum() < 10
    for a, b in zip(master_params(optimizers[0]), master_params(optimizers[1]), strict=True):
        assert a is b
    for optimizer in optimizers:
        optimizer.step()


def test_masters_made_under_inference_mode_can_be_trained():
    model = initialize(nn.Linear(4, 4), opt_level="O2", verbosity=0)
    with torch.inference_mode():
        model.state_dict()
    model(torch.randn(2, 4)).sum().backward()
    assert model.weight.grad is not None
