"""A small model and its data, amp on it, and its steps, for tests of anything that trains.

A test of a step reads ``model, optimizer = start("O2")``, ``backward(model, optimizer, times=INF)``,
``optimizer.step()``. A test that has a model of its own begins with ``initialized`` and steps with ``make_step``.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from internals import masters_of
from seeded import seeded

from ampcompat import amp

INF = float("inf")


# -- any model ---------------------------------------------------------------------------------------------------------
def initialized(model, level, lr=0.1, **options):
    """Return ``model`` and an SGD for it, as ``amp.initialize`` returns them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def make_step(optimizer, loss, **options):
    """Scale ``loss``, go backward, step."""
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()


# -- the small model ---------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Two linear layers with batch norm between them."""

    def __init__(self, inputs=6, hidden=8, classes=3):
        super().__init__()
        self.a = nn.Linear(inputs, hidden)
        self.bn = nn.BatchNorm1d(hidden)
        self.b = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.b(torch.relu(self.bn(self.a(x))))


def net(seed=0):
    """Return a ``Net`` whose weights are the same each time."""
    torch.manual_seed(seed)
    return Net()


def batch(seed=0, n=16):
    """Return inputs for a ``Net`` and their classes."""
    g = seeded(seed)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def loss_of(model, seed=0):
    """Return the loss of ``model`` for the batch of ``seed``."""
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.1, **kwargs):
    """Return an SGD for ``model``."""
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


def start(opt_level="O2", make_optimizer=sgd, model=None, **kwargs):
    """Return a model and its optimizer, initialized in silence; messages after that are printed."""
    model = net() if model is None else model
    found = amp.initialize(model, make_optimizer(model), opt_level=opt_level, verbosity=0, **kwargs)
    amp._amp_state.verbosity = 1
    return found


def backward(model, optimizer, seed=0, times=1.0, **kwargs):
    """Run one ``scale_loss`` block over the loss of the batch of ``seed``; ``times=inf`` makes it overflow."""
    loss = loss_of(model, seed) * times
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()
    return loss.detach()


def train(model, optimizer, steps=3, **kwargs):
    """Take ``steps`` steps, clear after each, and return the losses."""
    losses = []
    for step in range(steps):
        losses.append(backward(model, optimizer, step, **kwargs))
        optimizer.step()
        optimizer.zero_grad()
    return losses


# -- what a test compares ----------------------------------------------------------------------------------------------
def masters(optimizer):
    """Return copies of what ``optimizer`` steps: float32 masters where the level has them."""
    return [p.detach().clone() for p in amp.master_params(optimizer)]


def same(left, right):
    """Whether two lists of tensors are equal, bitwise."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_masters_agree(model, optimizer=None):
    """Assert that every half tensor is its master, rounded, bitwise, and that ``optimizer`` holds none of them."""
    model.state_dict()  # each copy follows what was written to the other
    found = masters_of(model)
    assert found, "the model has no masters"
    for master in found:
        assert torch.equal(master.value.detach().to(master.half.dtype), master.half.detach())
    if optimizer is not None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert not held & {id(master.half) for master in found}, "the optimizer holds half parameters"
