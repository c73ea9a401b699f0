"""Two optimizers over the same parameters, in one block: unscaled once."""

import pytest
import torch
from torch import nn

from ampcompat.amp import _amp_state, initialize, master_params, scale_loss, step_was_skipped


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


def two_optimizers(level, **kwargs):
    """A model of two layers, and an optimizer for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    params = [list(layer.parameters()) for layer in model]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in params]
    return initialize(model, optimizers, opt_level=level, verbosity=0, **kwargs)


def backward(model, optimizers, seed=0, times=1.0, **kwargs):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    with scale_loss(model(x).float().square().mean() * times, optimizers, **kwargs) as scaled:
        scaled.backward()


def values(optimizers):
    return [p.detach().clone() for optimizer in optimizers for p in master_params(optimizer)]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pending_gradients_are_unscaled_once(level):
    """They are pending for two optimizers with the same parameters, after one or two delayed blocks."""
    model, optimizers = two_optimizers(level)
    backward(model, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    want = values(optimizers)
    for blocks in (1, 2):
        model, optimizers = two_optimizers(level)
        for _ in range(blocks):
            backward(model, optimizers, times=1 / blocks, delay_unscale=True)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(values(optimizers), want)
        assert _amp_state.loss_scalers[0]._unskipped == 1  # they are one backward pass


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_pending_overflow_skips_both_steps(level):
    """Two optimizers share the gradients, and the scale is lowered once."""
    model, optimizers = two_optimizers(level)
    before = values(optimizers)
    backward(model, optimizers, times=float("inf"), delay_unscale=True)
    for optimizer in optimizers:
        optimizer.step()
        assert step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(values(optimizers), before, strict=True))
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
