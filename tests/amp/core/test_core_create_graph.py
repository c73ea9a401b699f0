"""Gradients with a graph, of ``backward(create_graph=True)``: functions of ``p.grad`` can be differentiated."""

import pytest
import torch
from internals import master_of
from seeded import seeded
from torch import nn

from ampcompat import amp

# torch's own advice about reference cycles; these tests clear the gradients.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:Using backward:UserWarning")]

LEVELS = [("O0", 128.0), ("O1", 128.0), ("O2", 128.0), ("O2", 1.0), ("O3", 128.0), ("O0", "dynamic")]


class Run:
    """A network, and what its gradients are differentiated for: the gradient of (a step's gradient, times a vector)."""

    def __init__(self, level=None, loss_scale=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.level = level
        if level is not None:
            amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)

    def loss(self, seed, factor):
        return self.model(torch.randn(8, 6, generator=seeded(seed))).float().square().mean() * factor

    def backward(self, seed=0, factor=1.0, create_graph=True, **kwargs):
        loss = self.loss(seed, factor)
        if self.level is None:
            loss.backward(create_graph=create_graph)
            return
        with amp.scale_loss(loss, self.optimizer, **kwargs) as scaled:
            scaled.backward(create_graph=create_graph)

    @property
    def params(self):
        if self.level is None:
            return list(self.model.parameters())
        return list(amp.master_params(self.optimizer))

    def product(self):
        """The Hessian of all losses so far times a vector, through ``p.grad``; gradients are cleared."""
        vectors = [torch.randn(p.shape, generator=seeded(index)) for index, p in enumerate(self.params)]
        product = sum((p.grad.float() * v.to(p.device)).sum() for p, v in zip(self.params, vectors, strict=True))
        found = torch.autograd.grad(product, list(self.model.parameters()))
        self.optimizer.zero_grad()
        return [part.float() for part in found]


def assert_near(found, wanted, level):
    # In half, each of the products and sums of the two backward passes is rounded.
    rounding = {"rtol": 1e-6, "atol": 1e-7} if level == "O0" else {"rtol": 2e-2, "atol": 1e-2}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **rounding)


@pytest.mark.parametrize(("level", "loss_scale"), LEVELS)
def test_a_product_with_the_hessian(level, loss_scale):
    plain, run = Run(), Run(level, loss_scale)
    for each in (plain, run):
        each.backward()
    assert_near([p.grad.detach().float() for p in run.params], [p.grad.detach() for p in plain.params], level)
    assert_near(run.product(), plain.product(), level)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("level", "loss_scale"), LEVELS)
def test_of_accumulated_ones(level, loss_scale, delayed):
    plain, run = Run(), Run(level, loss_scale)
    plain.backward(seed=0)
    plain.backward(seed=1)
    run.backward(seed=0, delay_unscale=delayed)
    if delayed and loss_scale == "dynamic":  # the next block rescales what it finds
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
    run.backward(seed=1)
    assert_near(run.product(), plain.product(), level)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_beside_gradients_without_a_graph(level):
    plain, run = Run(), Run(level, 128.0)
    for each in (plain, run):
        each.backward(seed=0, create_graph=False)
        each.backward(seed=1)
    assert_near([p.grad.detach() for p in run.params], [p.grad.detach() for p in plain.params], level)
    assert_near(run.product(), plain.product(), level)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step(level):
    run = Run(level, "dynamic")
    run.backward(factor=float("inf"))
    run.optimizer.step()
    assert amp.step_was_skipped(run.optimizer)
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.step()
    assert not amp.step_was_skipped(run.optimizer)
    run.optimizer.zero_grad()


def test_gradients_of_masters_have_their_strides():
    """Fused optimizers go through the memory of both."""
    run = Run("O2", 128.0)
    weight = run.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    run.backward()
    master = master_of(weight)
    assert master.value.grad.stride() == master.value.stride()
    run.product()
