"""What the tests of the core share: a tiny net, data, and the invariant of masters."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from internals import masters_of
from seeded import seeded

from ampcompat import amp


class Net(nn.Module):
    def __init__(self, inputs=6, hidden=8, classes=3):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.b(torch.relu(self.bn(self.a(x))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(seed=0, n=16):
    g = seeded(seed)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def loss_of(model, seed=0):
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.1, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


def start(opt_level="O2", make_optimizer=sgd, model=None, **kwargs):
    """A model and its optimizer, initialized in silence; what comes later is said."""
    model = net() if model is None else model
    found = amp.initialize(model, make_optimizer(model), opt_level=opt_level, verbosity=0, **kwargs)
    amp._amp_state.verbosity = 1
    return found


def backward(model, optimizer, seed=0, times=1.0, **kwargs):
    loss = loss_of(model, seed) * times
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()
    return loss.detach()


def train(model, optimizer, steps=3, **kwargs):
    losses = []
    for step in range(steps):
        losses.append(backward(model, optimizer, step, **kwargs))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def masters(optimizer):
    return [p.detach().clone() for p in amp.master_params(optimizer)]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_tied(model):
    """The invariant: every half tensor is its master, rounded; bitwise."""
    model.state_dict()  # has masters follow what was written
    found = masters_of(model)
    assert found
    for master in found:
        assert torch.equal(master.value.detach().to(master.half.dtype), master.half.detach())
